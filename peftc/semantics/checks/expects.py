"""What an expectation can be about."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.semantics.vocabulary import OF_EDIT, PLAN_COUNTS, TRUTHS
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

_FACTS = (*PLAN_COUNTS, *OF_EDIT, *TRUTHS)


def check_expect(expect: ast.Expect, edits: Collection[str]) -> Iterator[Diagnostic]:
    """P116 for a fact that there is not, P117 for an edit that there is not."""
    found = [*_value(expect.left, edits), *(_value(expect.right, edits) if expect.right is not None else ())]
    yield from found
    if found:
        return
    truth = _is_truth(expect.left)
    if expect.right is None:
        if not truth:
            help_ = f"compare it: `expect {print_expression(expect.left)} <= …`"
            yield Diagnostic(
                "P116",
                f"`{print_expression(expect.left)}` is a number, which is neither true nor false",
                expect.left.span,
                help=help_,
            )
    elif truth != _is_truth(expect.right) or (truth and expect.op not in {"==", "!="}):
        message = f"`{print_expression(expect.left)}` and `{print_expression(expect.right)}` cannot be compared so"
        help_ = f"write `expect {print_expression(expect.left)}`" if truth else None
        yield Diagnostic("P116", message, expect.left.span.until(expect.right.span), help=help_)


def _is_truth(value: ast.Expr) -> bool:
    return isinstance(value, ast.Boolean) or (isinstance(value, ast.Call) and value.function in TRUTHS)


def _value(value: ast.Expr, edits: Collection[str]) -> Iterator[Diagnostic]:
    match value:
        case ast.Number() | ast.Boolean():
            pass
        case ast.Negative(operand):
            yield from _value(operand, edits)
        case ast.Binary(_, left, right):
            yield from _value(left, edits)
            yield from _value(right, edits)
        case ast.Name(name) if name in PLAN_COUNTS:
            pass
        case ast.Call(function) if function in (*OF_EDIT, *TRUTHS):
            yield from _of_edit(value, edits)
        case ast.Call(function):
            help_ = did_you_mean(function, (*OF_EDIT, *TRUTHS)) or _known()
            if function in PLAN_COUNTS:
                help_ = f"`{function}` is a number of the whole plan: write it without `(…)`"
            yield Diagnostic("P116", f"there is no fact `{function}(…)`", value.function_span, help=help_)
        case ast.Name(name):
            help_ = f"say of which edit: `{name}(…)`" if name in _FACTS else did_you_mean(name, _FACTS) or _known()
            yield Diagnostic("P116", f"there is no fact `{name}`", value.span, help=help_)
        case ast.String():
            yield Diagnostic("P116", f"`{print_expression(value)}` is no number", value.span, help=_known())


def _of_edit(call: ast.Call, edits: Collection[str]) -> Iterator[Diagnostic]:
    for keyword in call.kwargs:
        yield Diagnostic("P102", f"`{call.function}` has no argument `{keyword.name}`", keyword.span)
    if len(call.args) != 1 or not isinstance(call.args[0], ast.Name):
        yield Diagnostic(
            "P116",
            f"`{call.function}` takes the name of one edit",
            call.span,
            help=f"the edits are {join_names(edits)}",
        )
        return
    name = call.args[0].id
    if name not in edits:
        help_ = did_you_mean(name, edits) or f"the edits are {join_names(edits)}"
        yield Diagnostic("P117", f"there is no edit `{name}`", call.args[0].span, help=help_)


def _known() -> str:
    of_edit = join_names([f"{name}(edit)" for name in (*OF_EDIT, *TRUTHS)])
    return f"there are {join_names(PLAN_COUNTS)}, and {of_edit}"
