"""Expressions and selectors to text, with the fewest parentheses."""

from __future__ import annotations

from peftc.syntax import ast

_SUM, _PRODUCT, _FACTOR = 1, 2, 3
_PRECEDENCE = {"+": _SUM, "-": _SUM, "*": _PRODUCT, "/": _PRODUCT}


def print_expression(value: ast.Expr, precedence: int = 0) -> str:
    """`value` where an operand of at least `precedence` is expected: 0 is anything."""
    match value:
        case ast.Number(amount, unit):
            return f"{amount!r}{unit}"
        case ast.Boolean(truth):
            return "true" if truth else "false"
        case ast.Name(name):
            return name
        case ast.String(text):
            return f'"{text}"'
        case ast.Call(function, args, kwargs):
            named = (f"{keyword.name}={print_expression(keyword.value)}" for keyword in kwargs)
            return f"{function}({', '.join([*map(print_expression, args), *named])})"
        case ast.Negative(operand):
            return f"-{print_expression(operand, _FACTOR)}"
        case ast.Binary(op, left, right):
            own = _PRECEDENCE[op]
            text = f"{print_expression(left, own)} {op} {print_expression(right, own + 1)}"
            return f"({text})" if own < precedence else text


def print_selector(value: ast.Selector, nested: bool = False) -> str:
    """`value`; if `nested` in another selector, a union or difference stands in parentheses."""
    match value:
        case ast.Path(steps):
            return ".".join(map(print_step, steps))
        case ast.Glob(pattern):
            return f'"{pattern}"'
        case ast.Union(arms):
            text = " | ".join(print_selector(arm, nested=True) for arm in arms)
        case ast.Difference(left, right):
            first = print_selector(left, nested=not isinstance(left, ast.Difference))
            text = f"{first} - {print_selector(right, nested=True)}"
    return f"({text})" if nested else text


def print_step(value: ast.Step) -> str:
    """`layer[0, 3..5]`"""
    return value.name if value.indices is None else f"{value.name}[{', '.join(map(print_index, value.indices))}]"


def print_index(value: ast.Index) -> str:
    """`*`, `3`, `0..5`, `6..`, `..5`"""
    if value.start is None and value.stop is None:
        return "*"
    if value.start == value.stop:
        return str(value.start)
    start, stop = ("" if end is None else str(end) for end in (value.start, value.stop))
    return f"{start}..{stop}"
