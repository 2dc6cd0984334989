"""The errors of values at selected places that need no site."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic
from peftc.equations.words import SCATTER, criterion_of, is_choice_of_numbers
from peftc.syntax import ast
from peftc.syntax.printer import print_expression


def check_scatter(form: ast.Form, call: ast.Call, limited: dict[str, str]) -> Iterator[Diagnostic]:
    """The errors of `scatter(v, places, n)`: v is a parameter, or its transpose.

    Args: `limited`: the parameters of which a form has one selection, or one budget.
    """
    lines = {line.name: line for line in form.body if isinstance(line, ast.Parameter)}
    text, (value, places) = f"`{print_expression(call)}`", (*call.args, None, None)[:2]
    value = value.args[0] if isinstance(value, ast.Call) and value.function == "t" and value.args else value
    v, at = (lines.get(part.id) if isinstance(part, ast.Name) else None for part in (value, places))
    if at is None or not (criterion_of(at) or is_choice_of_numbers(at)):
        help_ = "write `fixed places[k] = selection(select)`, and `scatter(v, places, n)`"
        yield Diagnostic("P105", f"{text} has no places that are selected or chosen", call.span, help=help_)
    elif v is None or v.fixed or v.scope != at.scope or at.sizes[0] not in v.sizes:
        message = f"{text} has no parameter with the dimension of `{at.name}`, and `per` the same"
        yield Diagnostic("P105", message, call.span)
    elif at.scope and (len(v.sizes) > 1 or v.value in (ast.Name("kaiming"), ast.Name("orthogonal"))):
        message = f"`{v.name}` is one vector for all sites, with a first value of each entry"
        yield Diagnostic("P105", message, call.span)
    elif criterion_of(at) and limited.setdefault(SCATTER, v.name) != v.name:
        message = f"`{limited[SCATTER]}` has selected values already, and a form has one selection"
        yield Diagnostic("P111", message, call.span)


def check_rows_at(form: ast.Form, call: ast.Call) -> Iterator[Diagnostic]:
    """The errors of `rows_at(a, places)`: the places are selected, those of one site."""
    lines = [line for line in form.body if isinstance(line, ast.Parameter) and not line.scope]
    places = [line for line in lines if criterion_of(line) or is_choice_of_numbers(line)]
    if call.args[1:] not in [(ast.Name(line.name),) for line in places]:
        help_ = "write `fixed places[k] = selection(select)`, and `rows_at(a, places)`"
        message = f"`{print_expression(call)}` has no places that are selected at the site"
        yield Diagnostic("P105", message, call.span, help=help_)
