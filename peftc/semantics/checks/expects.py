"""Checks of `expect`: the facts and edits exist, and the comparison makes sense."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.semantics.vocabulary import EDIT_FACTS, PLAN_COUNTS, PREDICATES
from peftc.semantics.walk import children
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

_FACTS = (*PLAN_COUNTS, *EDIT_FACTS)
_ALL_FACTS = f"there are {join_names(PLAN_COUNTS)}, and {join_names([f'{name}(edit)' for name in EDIT_FACTS])}"


def check_expect(expect: ast.Expect, edits: Collection[str]) -> Iterator[Diagnostic]:
    """P116 for unknown facts and meaningless comparisons, P117 for unknown edits."""
    sides = [expect.left] if expect.right is None else [expect.left, expect.right]
    errors = [error for side in sides for error in _value(side, edits)]
    yield from errors or _comparison(expect)


def _comparison(expect: ast.Expect) -> Iterator[Diagnostic]:
    left = print_expression(expect.left)
    is_predicate = _is_predicate(expect.left)
    if expect.right is None:
        if not is_predicate:
            message = f"`{left}` is a number, which is neither true nor false"
            yield Diagnostic("P116", message, expect.left.span, help=f"compare it: `expect {left} <= …`")
    elif is_predicate != _is_predicate(expect.right) or (is_predicate and expect.op not in {"==", "!="}):
        message = f"`{left}` and `{print_expression(expect.right)}` cannot be compared with `{expect.op}`"
        help_ = f"write `expect {left}`" if is_predicate else None
        yield Diagnostic("P116", message, expect.left.span.until(expect.right.span), help=help_)


def _is_predicate(value: ast.Expr) -> bool:
    return isinstance(value, ast.Boolean) or (isinstance(value, ast.Call) and value.function in PREDICATES)


def _value(value: ast.Expr, edits: Collection[str]) -> Iterator[Diagnostic]:
    match value:
        case ast.Negative() | ast.Binary():
            for operand in children(value):
                yield from _value(operand, edits)
        case ast.Call(function) if function in EDIT_FACTS:
            yield from _fact_of_edit(value, edits)
        case ast.Call(function):
            help_ = did_you_mean(function, EDIT_FACTS) or _ALL_FACTS
            if function in PLAN_COUNTS:
                help_ = f"`{function}` is a number of the whole plan: write it without `(…)`"
            yield Diagnostic("P116", f"there is no fact `{function}(…)`", value.function_span, help=help_)
        case ast.Name(name) if name not in PLAN_COUNTS:
            help_ = did_you_mean(name, _FACTS) or _ALL_FACTS
            if name in EDIT_FACTS:
                help_ = f"name the edit: `{name}(…)`"
            yield Diagnostic("P116", f"there is no fact `{name}`", value.span, help=help_)
        case ast.String():
            yield Diagnostic("P116", f"`{print_expression(value)}` is not a number", value.span, help=_ALL_FACTS)
        case _:
            pass


def _fact_of_edit(call: ast.Call, edits: Collection[str]) -> Iterator[Diagnostic]:
    for keyword in call.kwargs:
        yield Diagnostic("P102", f"`{call.function}` has no argument `{keyword.name}`", keyword.span)
    all_edits = f"the edits are {join_names(edits)}"
    if len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        yield Diagnostic("P116", f"`{call.function}` takes the name of one edit", call.span, help=all_edits)
        return
    name = call.args[0].id
    if name not in edits:
        help_ = did_you_mean(name, edits) or all_edits
        yield Diagnostic("P117", f"there is no edit `{name}`", call.args[0].span, help=help_)
