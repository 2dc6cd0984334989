"""What can be said about an expanded spec without a model."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean
from peftc.forms import FORMS
from peftc.semantics.arguments import bind
from peftc.semantics.checks.equations import check_edit, unknown_form
from peftc.semantics.checks.selectors import check_selector
from peftc.semantics.checks.structure import check_structure, with_origin
from peftc.semantics.vocabulary import CONCAT, FROZEN_MODULES, PARAMETERS
from peftc.semantics.walk import arms, is_shared, walk
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_selector


def check(spec: ast.Spec) -> list[Diagnostic]:
    """Everything wrong with an expanded spec: P1xx, P205, P208, P302. Each names the text it is about."""
    shared = {s.name: s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)}
    bodies = (line.value for s in spec.statements if isinstance(s, ast.Edit) for line in s.body)
    called = {e.function for value in bodies for e in walk(value) if isinstance(e, ast.Call)}
    found = [*check_structure(spec), *_twice_assigned(spec)]
    for statement in spec.statements:
        match statement:
            case ast.Edit():
                errors = [*check_selector(statement.selector), *check_edit(statement, shared)]
            case ast.Train():
                errors = [*check_selector(statement.selector), *_train(statement)]
            case ast.Let():
                errors = [*_shared(statement), *_unused(statement, called)]
            case _:
                errors = []
        found += (with_origin(error, statement, spec) for error in errors)
    return found


def _train(train: ast.Train) -> Iterator[Diagnostic]:
    for number, state in enumerate(train.states):
        if state not in PARAMETERS:
            help_ = did_you_mean(state, PARAMETERS) or "`w` is the weight, `b` the bias"
            yield Diagnostic("P107", f"`train` names parameters of the base, found `{state}`", train.span, help=help_)
        elif state in train.states[:number]:
            yield Diagnostic("P104", f"`{state}` is given twice", train.span, help="remove one of them")


def _shared(let: ast.Let) -> Iterator[Diagnostic]:
    call = let.value
    assert isinstance(call, ast.Call)
    inner = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if let.name in FORMS or let.name in (*FROZEN_MODULES, CONCAT):
        yield Diagnostic("P121", f"`{let.name}` is the name of a function", let.span, help="use another name")
    if not isinstance(inner, ast.Call):
        yield Diagnostic(
            "P115", "`shared` takes one form", call.span, help="e.g. `let P = shared(adapter(r=8))`, used as `P(x)`"
        )
    elif inner.function not in FORMS:
        yield unknown_form(inner, {})
    else:
        try:
            bind(inner, FORMS[inner.function], shared=True)
        except PeftcError as error:
            yield from error.diagnostics


def _unused(let: ast.Let, called: set[str]) -> Iterator[Diagnostic]:
    if let.name not in called:
        yield Diagnostic("P114", f"`{let.name}` is never used", let.span, help="remove it", severity="warning")


def _twice_assigned(spec: ast.Spec) -> Iterator[Diagnostic]:
    """P302: two edits that assign one state at sites that are written alike; the planner finds the others."""
    first: dict[tuple[str, str], ast.Edit] = {}
    for edit in (s for s in spec.statements if isinstance(s, ast.Edit)):
        whole = _takes_away(edit.selector)
        places = (
            [print_selector(edit.selector)] if whole else sorted({print_selector(arm) for arm in arms(edit.selector)})
        )
        assigned = {
            line.target: line for line in reversed(edit.body) if isinstance(line, ast.Equation) and line.op == "="
        }
        for target, line in reversed(assigned.items()):
            other = next((first[target, place] for place in places if (target, place) in first), None)
            if other is None:
                first.update({(target, place): edit for place in places})
                continue
            message = f"`{edit.name}` and `{other.name}` both assign `{target}` at one site"
            help_ = "write both equations in one edit, in the order that is meant"
            yield with_origin(Diagnostic("P302", message, line.target_span, help=help_), edit, spec)


def _takes_away(selector: ast.Selector) -> bool:
    match selector:
        case ast.Difference():
            return True
        case ast.Union(parts):
            return any(map(_takes_away, parts))
        case _:
            return False
