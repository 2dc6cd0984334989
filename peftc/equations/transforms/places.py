"""Numbers of rows, or entries, that are chosen once: `fixed places[k] = choice(n)`."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.equations.operands import Operands
from peftc.equations.values import FormError
from peftc.equations.words import GATHER, ROWS_AT, SCATTER, TAIL, criterion_of, is_choice_of_numbers
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import walk


def selects(place: Operands, call: ast.Call) -> bool:
    """Whether the places of `scatter(v, places, n)` are selected, and not chosen once."""
    line = _line(place, call)
    return line is not None and bool(criterion_of(line))


def _line(place: Operands, call: ast.Call) -> ast.Parameter | None:
    """That of the places of a call."""
    places = call.args[1]
    return place.parameters.get(places.id) if isinstance(places, ast.Name) else None


def check_places(place: Operands, parts: Iterable[ast.Expr]) -> None:
    """Raises: FormError P318 where numbers are chosen of more than there are, or are put twice."""
    for call in (part for value in parts for part in walk(value) if isinstance(part, ast.Call)):
        line = _line(place, call) if call.function in (GATHER, SCATTER, ROWS_AT) else None
        if line is None or not is_choice_of_numbers(line):
            continue
        assert isinstance(line.value, ast.Call)
        chosen, count = place.size(line.value.args[0]), place.sizes[line.name][0]
        there = place.size(call.args[2]) if call.function == SCATTER else place.type_of(call.args[0]).size[0]
        text = f"`{print_expression(call)}` has {there} places"
        if chosen > there:
            raise FormError("P318", f"{text}, and `{line.name}` numbers up to {chosen}", line.value)
        if line.value.function == TAIL and count > chosen:
            raise FormError("P318", f"`{line.name}` has {count} of {chosen} numbers", line.value)
        if call.function == SCATTER and count > chosen:
            raise FormError("P318", f"{text}, and `{line.name}` the same number more than once", line.value)
