"""What stands for other expressions: `sum(i in n, A[i] @ x)`, written out where n is known,
`initial(B @ A)`, the value with the first values of its parameters, and `rows(table, ids)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from peftc.equations.operands import Operands
from peftc.equations.values import FormError, Value
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import map_children, walk

INITIAL = "initial"
BINDERS: Mapping[str, Literal["+", "*", "@"]] = {"sum": "+", "product": "*"}  # of matrices, the product is `@`
_MOST_TERMS, _MOST_PARTS = 256, 20_000


def write_out(place: Operands, node: ast.Expr, numbers: Mapping[str, int] | None = None) -> ast.Expr:
    """An expression in which each sum and product over a number is its terms.

    Args:
        numbers: what the bound names around it are.

    Raises: FormError if a number of terms is not known, or there are too many.
    """
    numbers = numbers or {}
    match node:
        case ast.Name(name, span=span) if name in numbers:
            return ast.Number(numbers[name], span=span)
        case ast.Call(function, (ast.Binding(name, count), term)) if function in BINDERS:
            terms = _terms(place, node, name, write_out(place, count, numbers), term, numbers)
            return _joined(place, function, terms, node)
        case ast.Call("rows", (table, ids)):
            transposed = ast.Call("t", (write_out(place, table, numbers),), (), span=node.span)
            return ast.Binary("@", transposed, write_out(place, ids, numbers), span=node.span)
        case ast.Call(function, (value,)) if function == INITIAL:
            return _initial(place, write_out(place, value, numbers), node)
        case _:
            return map_children(node, lambda part: write_out(place, part, numbers))


def is_written_out(node: ast.Expr) -> bool:
    """Whether a part of a text stands for another expression."""
    is_call = isinstance(node, ast.Call) and (
        node.function == INITIAL or (node.function == "rows" and len(node.args) == 2)
    )
    return is_call or isinstance(node, ast.Binding)


def initial_name(parameter: str) -> str:
    """The name of the copy of a parameter that keeps its first value."""
    return f"{parameter}_{INITIAL}"


def _initial(place: Operands, value: ast.Expr, call: ast.Call) -> ast.Expr:
    """A value in which each trained parameter is its copy with the first value."""
    match value:
        case ast.Name(name, span=span) if name in place.parameters and not place.parameters[name].fixed:
            if initial_name(name) in (*place.sizes, *place.lets, *place.numbers) and name not in place.copies.values():
                message = (
                    f"`{print_expression(call)}` keeps the first value as `{initial_name(name)}`, which is another"
                )
                raise FormError("P111", message, call, "use another name")
            place.copies[initial_name(name)] = name
            place.sizes[initial_name(name)] = place.sizes[name]
            place.parameters[initial_name(name)] = replace(place.parameters[name], name=initial_name(name))
            return ast.Name(initial_name(name), span=span)
        case ast.Name(name) if name in place.lets:
            return _initial(place, place.lets[name], call)
        case _:
            return map_children(value, lambda part: _initial(place, part, call))


def _terms(
    place: Operands, node: ast.Call, name: str, count: ast.Expr, term: ast.Expr, numbers: Mapping[str, int]
) -> list[ast.Expr]:
    place.derived_nodes.append(count)  # what the place knows of it is by its id
    number = place.size(count)
    if number > _MOST_TERMS or number * sum(1 for _ in walk(term)) > _MOST_PARTS:
        message = f"`{print_expression(node)}` has {number:,} terms, more than are written out"
        raise FormError("P318", message, count, help_="use a matrix, over which one product sums")
    return [write_out(place, term, {**numbers, name: i}) for i in range(number)]


def _joined(place: Operands, function: str, terms: list[ast.Expr], node: ast.Call) -> ast.Expr:
    op = BINDERS[function]
    first = place.operand(terms[0])
    if op == "*" and isinstance(first, Value) and not first.type.batch and len(first.type.size) == 2:
        op = "@"
    place.derived_nodes += terms
    joined, *others = reversed(terms) if op == "@" else terms
    for term in others:
        left, right = (term, joined) if op == "@" else (joined, term)
        joined = ast.Binary(op, left, right, span=node.span)
    return joined
