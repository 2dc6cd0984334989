"""Checks of an expanded spec that need no model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.suggestions import did_you_mean
from peftc.forms import FORMS
from peftc.semantics.checks.definitions import unused
from peftc.semantics.checks.equations import bind_errors, check_edit, unknown_form
from peftc.semantics.checks.expects import check_expect
from peftc.semantics.checks.selectors import check_selector
from peftc.semantics.vocabulary import CONCAT, FROZEN_MODULES, PARAMETERS
from peftc.semantics.walk import arms, is_shared, walk
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_selector


def check(spec: ast.Spec) -> list[Diagnostic]:
    """All errors of an expanded spec: P1xx, P205, P208, P302. Each has its source."""
    edits = [s for s in spec.statements if isinstance(s, ast.Edit)]
    shared = {s.name: s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)}
    names = dict.fromkeys(s.name for s in spec.statements if isinstance(s, ast.Edit | ast.Train))
    values = (line.value for edit in edits for line in edit.body)
    called = {node.function for value in values for node in walk(value) if isinstance(node, ast.Call)}
    errors = [*_duplicate_names(spec), *_duplicate_assignments(spec, edits)]
    for statement in spec.statements:
        match statement:
            case ast.Edit():
                own = [*check_selector(statement.selector), *check_edit(statement, shared)]
                if not any(isinstance(line, ast.Equation) for line in statement.body):
                    help_ = "write an equation, e.g. `h += adapter(x, r=64)`"
                    message = f"the edit `{statement.name}` has no equation"
                    own.insert(0, Diagnostic("P119", message, statement.name_span, help=help_))
            case ast.Train():
                own = [*check_selector(statement.selector), *_train(statement)]
            case ast.Let():
                own = [*_shared(statement), *([] if statement.name in called else [unused(statement)])]
            case ast.Expect():
                own = check_expect(statement, names)
            case _:
                own = []
        errors += (with_origin(error, statement, spec) for error in own)
    return errors


def with_origin(diagnostic: Diagnostic, statement: ast.Statement, spec: ast.Spec) -> Diagnostic:
    """`diagnostic`, if it has no source, with that of `statement` and the `apply`s behind it."""
    if diagnostic.source:
        return diagnostic
    return replace(diagnostic, notes=(*diagnostic.notes, *statement.via), source=statement.origin or spec.source)


def _duplicate_names(spec: ast.Spec) -> Iterator[Diagnostic]:
    shared = [s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)]
    edits = [s for s in spec.statements if isinstance(s, ast.Edit | ast.Train)]
    first: dict[str, ast.Edit | ast.Train | ast.Let] = {}
    for statement in (*shared, *edits):
        other = first.setdefault(statement.name, statement)
        if other is statement:
            continue
        span = statement.span if isinstance(statement, ast.Let) else statement.name_span
        note = f"the other is in line {other.span.line} of {(other.origin or spec.source).path}"
        help_ = "give one of them another name"
        if statement.via or other.via:
            help_ = f"name one of the applied methods: `apply … as {statement.name}_2`"
        message = f"two edits are named `{statement.name}`"
        yield with_origin(Diagnostic("P111", message, span, notes=(note,), help=help_), statement, spec)


def _train(train: ast.Train) -> Iterator[Diagnostic]:
    for number, state in enumerate(train.states):
        if state not in PARAMETERS:
            help_ = did_you_mean(state, PARAMETERS) or "`w` is the weight, `b` the bias"
            yield Diagnostic(
                "P107", f"`train` takes the parameters `w` and `b`, found `{state}`", train.span, help=help_
            )
        elif state in train.states[:number]:
            yield Diagnostic("P104", f"`{state}` appears twice", train.span, help="remove one of them")


def _shared(let: ast.Let) -> Iterator[Diagnostic]:
    call = let.value
    assert isinstance(call, ast.Call)  # by `is_shared`
    inner = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if let.name in FORMS or let.name in (*FROZEN_MODULES, CONCAT):
        yield Diagnostic("P121", f"`{let.name}` is the name of a function", let.span, help="use another name")
    if not isinstance(inner, ast.Call):
        help_ = "e.g. `let P = shared(adapter(r=8))`, used as `P(x)`"
        yield Diagnostic("P115", "`shared` takes one form", call.span, help=help_)
    elif inner.function not in FORMS:
        yield unknown_form(inner, {})
    else:
        yield from bind_errors(inner, shared=True)


def _duplicate_assignments(spec: ast.Spec, edits: Sequence[ast.Edit]) -> Iterator[Diagnostic]:
    """P302 for equal selectors. The planner compares the sites of different selectors."""
    first: dict[tuple[str, str], ast.Edit] = {}
    for edit in edits:
        whole = _has_difference(edit.selector)
        places = sorted({print_selector(arm) for arm in ([edit.selector] if whole else arms(edit.selector))})
        assignments: dict[str, ast.Equation] = {}
        for line in edit.body:
            if isinstance(line, ast.Equation) and line.op == "=":
                assignments.setdefault(line.target, line)
        for target, line in assignments.items():
            other = next((first[target, place] for place in places if (target, place) in first), None)
            if other is None:
                first.update({(target, place): edit for place in places})
                continue
            message = f"`{edit.name}` and `{other.name}` both assign `{target}` at one site"
            help_ = "write both equations in one edit, in the intended order"
            yield with_origin(Diagnostic("P302", message, line.target_span, help=help_), edit, spec)


def _has_difference(selector: ast.Selector) -> bool:
    match selector:
        case ast.Difference():
            return True
        case ast.Union(parts):
            return any(map(_has_difference, parts))
        case _:
            return False
