"""Walking over expressions and selectors, without recursion where the depth is not known yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from peftc.semantics.vocabulary import SHARED, STACK_CHOICES
from peftc.syntax import ast


def children(value: ast.Expr) -> tuple[ast.Expr, ...]:
    """The expressions directly inside of `value`."""
    match value:
        case ast.Call(_, args, kwargs):
            return (*args, *(keyword.value for keyword in kwargs))
        case ast.Negative(operand):
            return (operand,)
        case ast.Binary(_, left, right):
            return (left, right)
        case _:
            return ()


def walk(value: ast.Expr) -> Iterator[ast.Expr]:
    """`value` and everything inside of it, in the order of the text."""
    stack = [value]
    while stack:
        found = stack.pop()
        yield found
        stack.extend(reversed(children(found)))


def size(value: ast.Expr, deepest: int, largest: int, known: Mapping[str, ast.Expr | None] | None = None) -> bool:
    """Whether `value` has at most `deepest` levels and `largest` expressions, with those of `known` in the place of names."""
    stack = [(value, 1, known)]
    seen = 0
    while stack:
        found, level, names = stack.pop()
        seen += 1
        if level > deepest or seen > largest:
            return False
        if names is not None and isinstance(found, ast.Name) and (meant := names.get(found.id)) is not None:
            stack.append((meant, level, None))  # what is known has no names to replace
            seen -= 1
            continue
        stack.extend((child, level + 1, names) for child in children(found))
    return True


def is_shared(value: ast.Expr) -> bool:
    """`shared(…)`: one set of parameters for all the sites that use it."""
    return isinstance(value, ast.Call) and value.function == SHARED


def names_in(value: ast.Expr) -> Iterator[str]:
    """Every name in `value`, those of functions among them."""
    for found in walk(value):
        if isinstance(found, ast.Name):
            yield found.id
        elif isinstance(found, ast.Call):
            yield found.function


def names_of(statements: Iterable[ast.Statement]) -> Iterator[str]:
    """Every name that the expressions of some statements use."""
    for statement in statements:
        match statement:
            case ast.Edit(body=body):
                yield from names_of(body)
            case ast.Method(params=params, body=body):
                yield from names_of(body)
                for param in params:
                    yield from names_in(param.default)
            case ast.Equation(value=value) | ast.Let(value=value):
                yield from names_in(value)
            case ast.Expect(left=left, right=right):
                yield from names_in(left)
                yield from names_in(right) if right is not None else ()
            case ast.Apply(args=args):
                for arg in args:
                    yield from names_in(arg.value)
            case _:
                pass


def arms(selector: ast.Selector) -> Iterator[ast.Path | ast.Glob]:
    """The paths and patterns that a selector is made of, what it takes away included."""
    match selector:
        case ast.Union(parts):
            for part in parts:
                yield from arms(part)
        case ast.Difference(left, right):
            yield from arms(left)
            yield from arms(right)
        case _:
            yield selector


def selects_stack(steps: Sequence[ast.Step], number: int) -> bool:
    """Whether a step is the `input` of `input.embed` or the `output` of `output.layer[*]`."""
    below = [step.name for step in steps[number + 1 : number + 2]]
    return below == [STACK_CHOICES.get(steps[number].name)]
