"""Checks of an expanded spec that need no model."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from peftc.diagnostics import Diagnostic, Suggestion
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.table import forms_of
from peftc.equations.words import NUMBERS
from peftc.semantics.checks.conditions import check_conditions
from peftc.semantics.checks.definitions import unused
from peftc.semantics.checks.edits import Forms, bind_errors, check_edit, check_selector, unknown_form
from peftc.semantics.moves import check_moves
from peftc.syntax import ast
from peftc.syntax.numbers import is_number
from peftc.syntax.printer import print_expression, print_selector, print_where
from peftc.syntax.vocabulary import CONCAT, EDIT_FACTS, FROZEN_MODULES, PARAMETERS, PLAN_COUNTS, PREDICATES
from peftc.syntax.walk import arms, children, differs_by_layer, is_shared, walk


def check(spec: ast.Spec) -> list[Diagnostic]:
    """All errors of an expanded spec: P1xx, P205, P208, P302. Each has its source."""
    edits = [s for s in spec.statements if isinstance(s, ast.Edit)]
    shared = {s.name: s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)}
    names = dict.fromkeys(s.name for s in spec.statements if isinstance(s, ast.Edit | ast.Train))
    values = (line.value for edit in edits for line in edit.body)
    called = {node.function for value in values for node in walk(value) if isinstance(node, ast.Call)}
    forms = forms_of(spec)
    errors = [*_duplicate_names(spec), *_duplicate_assignments(spec, edits)]
    for statement in spec.statements:
        match statement:
            case ast.Edit():
                own = [*check_selector(statement.selector), *check_conditions(statement)]
                own += check_edit(statement, shared, forms)
                if not any(isinstance(line, ast.Equation) for line in statement.body):
                    help_ = "write an equation, e.g. `h += adapter(x, r=64)`"
                    message = f"the edit `{statement.name}` has no equation"
                    own.insert(0, Diagnostic("P119", message, statement.name_span, help=help_))
            case ast.Train():
                own = [*check_selector(statement.selector), *check_conditions(statement), *_train(statement)]
            case ast.Let():
                own = [*_shared(statement, forms), *([] if statement.name in called else [unused(statement)])]
            case ast.Expect():
                own = check_expect(statement, names)
            case _:
                own = []
        errors += (with_origin(error, statement, spec) for error in own)
    errors += (with_origin(error, moved, spec) for moved, error in check_moves(spec))
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
            help_ = "remove one `apply`, or let its edits have other names: `apply … as second`"
        message = f"two edits are named `{statement.name}`"
        yield with_origin(Diagnostic("P111", message, span, notes=(note,), help=help_), statement, spec)


def _train(train: ast.Train) -> Iterator[Diagnostic]:
    spans = train.state_spans or (train.span,) * len(train.states)
    for number, (state, span) in enumerate(zip(train.states, spans, strict=True)):
        if state not in PARAMETERS:
            help_ = did_you_mean(state, PARAMETERS) or "`w` is the weight, `b` the bias"
            message = f"`train` takes the parameters `w` and `b`, found `{state}`"
            yield Diagnostic("P107", message, span, help=help_)
        elif state in train.states[:number]:
            yield Diagnostic("P104", f"`{state}` appears twice", span, help="remove one of them")


def _shared(let: ast.Let, forms: Forms) -> Iterator[Diagnostic]:
    call = let.value
    assert isinstance(call, ast.Call)  # by `is_shared`
    inner = call.args[0] if len(call.args) == 1 and not call.kwargs else None
    if let.name in forms or let.name in (*FROZEN_MODULES, CONCAT):
        yield Diagnostic("P121", f"`{let.name}` is the name of a function", let.span, help="use another name")
    if not isinstance(inner, ast.Call):
        help_ = "e.g. `let P = shared(adapter(r=8))`, used as `P(x)`"
        yield Diagnostic("P115", "`shared` takes one form", call.span, help=help_)
    elif inner.function not in forms:
        yield unknown_form(inner, {}, forms)
    elif by_layer := next((keyword for keyword in inner.kwargs if differs_by_layer(keyword.value)), None):
        message = f"`{by_layer.name}` differs by layer, and `{let.name}` is shared by the layers"
        yield Diagnostic("P323", message, by_layer.span, help="write one value")
    else:
        yield from bind_errors(inner, forms, shared=True)


def _duplicate_assignments(spec: ast.Spec, edits: Sequence[ast.Edit]) -> Iterator[Diagnostic]:
    """P302 for equal selectors. The planner compares the sites of different selectors."""
    first: dict[tuple[str, str], ast.Edit] = {}
    for edit in edits:
        whole = _has_difference(edit.selector)
        where = print_where(edit)
        places = sorted({print_selector(arm) + where for arm in ([edit.selector] if whole else arms(edit.selector))})
        assignments: dict[str, ast.Equation] = {}
        for line in edit.body:
            if isinstance(line, ast.Equation) and line.op == "=":
                assignments.setdefault(line.target, line)
        for target, line in assignments.items():
            other = next((first[target, place] for place in places if (target, place) in first), None)
            if other is None:
                first.update({(target, place): edit for place in places})
                continue
            if other.name == edit.name:  # P111
                continue
            message = f"`{edit.name}` and `{other.name}` both assign `{target}` at one site"
            help_ = "write both equations in one edit, in the intended order"
            yield with_origin(Diagnostic("P302", message, line.target_span, help=help_), edit, spec)


def _has_difference(selector: ast.Selector) -> bool:
    parts = selector.arms if isinstance(selector, ast.Union) else ()
    return isinstance(selector, ast.Difference) or any(map(_has_difference, parts))


# Expectations: the facts and edits exist, and the comparison makes sense

_FACTS = (*PLAN_COUNTS, *EDIT_FACTS)
_ALL_FACTS = f"there are {join_names(PLAN_COUNTS)}, and {join_names([f'{name}(edit)' for name in EDIT_FACTS])}"


def check_expect(expect: ast.Expect, edits: Collection[str]) -> Iterator[Diagnostic]:
    """P116 for unknown facts and meaningless comparisons, P117 for unknown edits."""
    sides = [expect.left] if expect.right is None else [expect.left, expect.right]
    yield from [error for side in sides for error in _fact(side, edits)] or _comparison(expect)


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


def _fact(value: ast.Expr, edits: Collection[str]) -> Iterator[Diagnostic]:
    match value:
        case ast.Negative() | ast.Binary():
            yield from (error for operand in children(value) for error in _fact(operand, edits))
        case ast.Call(function) if function in EDIT_FACTS:
            yield from _edit_fact(value, edits)
        case ast.Call(function):
            help_ = did_you_mean(function, EDIT_FACTS) or _ALL_FACTS
            if function in FUNCTIONS or function in NUMBERS:
                help_ = f"`{function}` stands in forms; facts and numbers are joined by `+ - * /`: write the number"
            if function in PLAN_COUNTS:
                help_ = f"`{function}` is a number of the whole plan: write it without `(…)`"
            yield Diagnostic("P116", f"there is no fact `{function}(…)`", value.function_span, help=help_)
        case ast.Name(name) if name not in PLAN_COUNTS:
            help_ = did_you_mean(name, _FACTS) or _ALL_FACTS
            if name in EDIT_FACTS:
                help_ = f"name the edit: `{name}(…)`"
            yield Diagnostic("P116", f"there is no fact `{name}`", value.span, help=help_)
        case ast.String():
            help_ = _ALL_FACTS
            if is_number(value.value):
                help_ = Suggestion("write it without quotes", f'"{value.value}"', value.value)
            yield Diagnostic("P116", f"`{print_expression(value)}` is not a number", value.span, help=help_)
        case _:
            pass


def _edit_fact(call: ast.Call, edits: Collection[str]) -> Iterator[Diagnostic]:
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
