"""Checks of the parameters that sites have in common by a number, and of those that change in other
ways than by training.
"""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import join_names
from peftc.equations.bindings import INITIAL
from peftc.equations.words import (
    BELOW,
    BUDGET,
    BUFFER,
    CROSS_LAYER,
    GATHER,
    PRUNED,
    PRUNED_PARTS,
    RANDOM,
    SELECTION,
    criterion_of,
    inputs_of,
    is_choice_of_numbers,
)
from peftc.forms.reserved import RESERVED_BESIDES
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import values, walk

WEIGHTS = ("w", "b")  # of the base, from which first values may be computed


def lines_of(form: ast.Form) -> list[ast.Parameter]:
    return [line for line in form.body if isinstance(line, ast.Parameter)]


def calls_of(form: ast.Form) -> list[ast.Call]:
    return [part for value in values(form) for part in walk(value) if isinstance(part, ast.Call)]


def is_first_value(form: ast.Form, name: str) -> bool:
    """Whether an argument is the first value of a parameter with its name."""
    is_argument = any(param.name == name for param in form.params) and name not in inputs_of(form)
    lines = [line for line in lines_of(form) if line.name == name]
    is_part = any(isinstance(line, ast.Let) and line.name == name for line in form.body)
    return is_argument and bool(lines) and not is_part and all(line.value == ast.Name(name) for line in lines)


def check_numbered(form: ast.Form, line: ast.Parameter, number: str) -> Iterator[Diagnostic]:
    """The errors of a parameter `per NUMBER`: no command and no weight gives its values."""
    names = {part.id for part in walk(line.value) if isinstance(part, ast.Name)}
    of_one_site = {BUFFER, *(name for name in WEIGHTS if name not in inputs_of(form))}
    if criterion_of(line) or names & of_one_site:
        message = f"`{line.name}` is `per {number}`, and its first value that of one site"
        yield Diagnostic("P105", message, line.value.span, help="write a number, or what is drawn, as `normal(0.02)`")
    begin, other = f"{line.name}_", next((one for one in lines_of(form) if _numbers(one.name, line.name)), None)
    if other is not None:
        message = f"`{line.name}` is `per {number}`, and its tensors are `{begin}0`, `{begin}1`, …"
        yield Diagnostic("P111", message, other.name_span, help="use another name")
    copies = (call for call in calls_of(form) if call.function == INITIAL)
    if any(ast.Name(line.name) in walk(copy) for copy in copies):
        message = f"`{line.name}` is `per {number}`, and `initial` keeps no first value of it"
        yield Diagnostic("P105", message, line.name_span, help="write `per edit`")


def _numbers(name: str, other: str) -> bool:
    """Whether a name is another one with a number, `A_0` of `A`."""
    begin, _, end = name.rpartition("_")
    return begin == other and end.isdecimal()


def check_pruned(form: ast.Form, call: ast.Call) -> Iterator[Diagnostic]:
    """The errors of `pruned(v, z, n)`: v is a parameter of each site."""
    name = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
    lines = [line for line in lines_of(form) if line.name == name]
    if not lines or any(line.fixed or line.scope not in ("", "site") for line in lines):
        help_ = "write `param v[rows(out), cols(out)] = 0`, and `pruned(v, z, n)`"
        yield Diagnostic("P105", f"`{print_expression(call)}` prunes no parameter of a site", call.span, help=help_)
    if len({one for one in calls_of(form) if one.function == PRUNED}) > 1:
        yield Diagnostic("P111", f"`{form.name}` prunes twice, and a form has one parameter that is pruned", call.span)
    if shared := next((line for line in lines_of(form) if line.scope not in ("", "site")), None):
        message = f"`{shared.name}` is one for several sites, which `{form.name}` prunes"
        yield Diagnostic("P111", message, shared.name_span, help="write a parameter of each site")


def pruned_part(value: ast.Expr) -> ast.Call | None:
    """The call of which `pruned(v, z, n).values` is a part; None for other values."""
    match value:
        case ast.Attribute(ast.Call(function) as call, name) if function == PRUNED and name in PRUNED_PARTS:
            return call
        case _:
            return None


def check_saved(form: ast.Form, value: ast.Expr) -> Iterator[Diagnostic]:
    """The error of a form that saves more than what it does not prune."""
    if any(call.function == PRUNED for call in calls_of(form)):
        message = f"what is saved of `{form.name}` is what it does not prune"
        help_ = "write `pruned(v, z, n).values` and `pruned(v, z, n).places`"
        yield Diagnostic("P105", message, value.span, help=help_)


def check_choices(form: ast.Form) -> Iterator[Diagnostic]:
    """The errors of `fixed places[k] = choice(n)`, and of `gather(v, places)`."""
    lines = {line.name: line for line in lines_of(form) if is_choice_of_numbers(line)}
    help_ = "write `fixed places[k] = choice(n)`, and `gather(v, places)`"
    for line in lines.values():
        if not line.fixed or len(line.sizes) != 1 or len(getattr(line.value, "args", ())) != 1:
            message = f"`{line.name}` has whole numbers, which nothing trains"
            yield Diagnostic("P105", message, line.value.span, help=help_)
    for call in calls_of(form):
        places = call.args[-1] if call.args else call
        if call.function == GATHER and not (isinstance(places, ast.Name) and places.id in lines):
            yield Diagnostic("P105", f"`{print_expression(call)}` has no places", places.span, help=help_)


def check_states(form: ast.Form) -> Iterator[Diagnostic]:
    """The errors of a form that is changed in several ways besides training, and of its places."""
    yield from check_choices(form)
    ways = {call.function for call in calls_of(form) if call.function in (RANDOM, BUDGET, PRUNED)}
    if any(line.value == ast.Name(BUFFER) for line in lines_of(form)):
        ways.add(BUFFER)
    if any(map(criterion_of, lines_of(form))):
        ways.add(SELECTION)
    if any(call.function in CROSS_LAYER for call in calls_of(form)):
        ways.add(BELOW)
    if len(ways) > 1:
        message = f"`{form.name}` has {join_names(sorted(ways), 'and')}, and a form has one of them"
        yield Diagnostic("P111", message, form.name_span, help="write two forms, and call both")
    for line in lines_of(form) if ways else ():
        if any(_is_of_module(line.name, way) for way in ways):
            message = f"no parameter can be named `{line.name}`: the module of such a form has that name"
            yield Diagnostic("P121", message, line.name_span, help="use another name")


def _is_of_module(name: str, way: str) -> bool:
    """Whether the module of a form that changes in this way has a name."""
    is_score = way == BUDGET and name.endswith(("_importance", "_uncertainty"))
    return is_score or name in RESERVED_BESIDES[way]
