"""Checks of `where d(x) >= 1024`, the conditions of an edit or a `train` statement on its sites."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equations.words import NUMBERS, OUT
from peftc.syntax import ast
from peftc.syntax.printer import print_expression
from peftc.syntax.vocabulary import LAYER, STATES
from peftc.syntax.walk import children, condition_values

SIZES_OF_STATES = ("d", "rows", "cols", "heads", "d_head", "entries")
_HELP = f"a condition has numbers, `{LAYER}`, and sizes of states: `where d(x) >= 1024`"


def check_conditions(statement: ast.Edit | ast.Train) -> Iterator[Diagnostic]:
    """P101, P105, P107 and P108 for what is no number of a site."""
    for condition in statement.where:
        for side in condition_values(condition):
            yield from _number(side, statement)


def _number(value: ast.Expr, statement: ast.Edit | ast.Train) -> Iterator[Diagnostic]:
    match value:
        case ast.Number():
            pass
        case ast.Name(name) if name == LAYER:
            pass
        case ast.Name(name):
            help_ = f"its size is `d({name})`" if name in STATES else did_you_mean(name, (LAYER,)) or _HELP
            yield Diagnostic("P107", f"`{name}` is no number of a site", value.span, help=help_)
        case ast.Negative() | ast.Binary() if not (isinstance(value, ast.Binary) and value.op == "@"):
            yield from (error for part in children(value) for error in _number(part, statement))
        case ast.Call(function) if function in SIZES_OF_STATES:
            yield from _size(value, statement)
        case ast.Call(function, args, ()) if function in NUMBERS and args:
            yield from (error for part in args for error in _number(part, statement))
        case ast.Call(function):
            help_ = did_you_mean(function, SIZES_OF_STATES) or f"sizes are {join_names(SIZES_OF_STATES)}"
            yield Diagnostic("P101", f"there is no size `{function}` of a state", value.function_span, help=help_)
        case _:
            message = f"expected a number, found `{print_expression(value)}`"
            yield Diagnostic("P105", message, value.span, help=_HELP)


def _size(call: ast.Call, statement: ast.Edit | ast.Train) -> Iterator[Diagnostic]:
    state = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if not isinstance(state, ast.Name):
        message = f"`{call.function}` takes one state, found `{print_expression(call)}`"
        yield Diagnostic("P108", message, call.span, help=f"e.g. `{call.function}(x)`")
    elif state.id == OUT:
        written = {line.target for line in getattr(statement, "body", ()) if isinstance(line, ast.Equation)}
        if len(written) != 1:
            message = f"`{OUT}` is the state that the equations write, here {join_names(sorted(written)) or 'none'}"
            yield Diagnostic("P107", message, state.span, help=f"name it: `{call.function}(h)`")
    elif state.id not in STATES:
        help_ = did_you_mean(state.id, (*STATES, OUT)) or f"states are {join_names(STATES)}"
        yield Diagnostic("P107", f"there is no state `{state.id}`", state.span, help=help_)
