"""Texts in pictures: equations, arguments and counts, in few characters."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace

from peftc.pictures.graph import Change
from peftc.planning.ir import Constant, FormCall, Term
from peftc.syntax import ast
from peftc.syntax.printer import print_expression

MOST_ARGUMENTS = 22  # characters of a line of arguments
MOST_FACTOR = 16


def full_equation(equation: ast.Equation) -> str:
    """As the formatter prints it."""
    return f"{equation.target} {equation.op} {print_expression(equation.value)}"


def short_equation(equation: ast.Equation) -> str:
    """Without the named arguments of forms."""
    return f"{equation.target} {equation.op} {print_expression(_without_arguments(equation.value))}"


def _without_arguments(value: ast.Expr) -> ast.Expr:
    match value:
        case ast.Call(_, args):
            return replace(value, args=tuple(map(_without_arguments, args)), kwargs=())
        case ast.Binary(_, left, right):
            return replace(value, left=_without_arguments(left), right=_without_arguments(right))
        case ast.Negative(operand):
            return replace(value, operand=_without_arguments(operand))
        case _:
            return value


def arguments(source: ast.Expr) -> Iterable[str]:
    """The first named arguments of a call, in one line."""
    if not isinstance(source, ast.Call) or not source.kwargs:
        return ()
    texts = [f"{one.name}={print_expression(one.value)}" for one in source.kwargs]
    line = texts[0]
    for text in texts[1:]:
        if len(line) + len(text) + 2 > MOST_ARGUMENTS:
            break
        line += f", {text}"
    return (shortened(line, MOST_ARGUMENTS),)


def factor_text(term: Term) -> str:
    if isinstance(term, Constant):
        return f"{term.value:g}"
    source = term.source
    if isinstance(term, FormCall) and isinstance(source, ast.Call):
        source = _without_arguments(source)
    return shortened(print_expression(source), MOST_FACTOR)


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def count_text(change: Change, layers: int) -> str:
    """`1,050,112 × 24`, or what all sites share."""
    times = change.sites * max(layers, 1)
    if change.shared:
        return f"{change.stored:,} in all"
    if not change.stored:
        return ""
    return f"{change.stored:,} × {times}" if times > 1 else f"{change.stored:,}"


def wrapped(text: str, width: int, most: int = 3) -> list[str]:
    """Lines of at most `width` characters; the last ends in … if there are more."""
    lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], shortened(" ".join(lines[most - 1 :]), width)]
    return lines
