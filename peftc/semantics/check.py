"""What can be said about a spec without a model; several errors in one run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean
from peftc.forms import FORMS
from peftc.semantics.arguments import bind
from peftc.semantics.check_definitions import check_definitions
from peftc.semantics.check_equations import check_edit, unknown_form
from peftc.semantics.check_selectors import check_selector
from peftc.semantics.check_structure import check_structure, said_of
from peftc.semantics.expand import only_method, partial
from peftc.semantics.scope import applied
from peftc.semantics.vocabulary import CONCAT, FROZEN, PARAMETERS
from peftc.semantics.walk import arms, expressions, is_shared
from peftc.syntax import ast
from peftc.syntax.print_expressions import selector

_OF_WHOLE = frozenset({"P114", "P117"})  # what could not be expanded may be what is missing
_OF_NAMES = frozenset({"P101", "P105", "P107"})


def check_file(spec: ast.Spec) -> list[Diagnostic]:
    """Everything wrong with a file as it was written: its definitions, what it applies, and each of its methods."""
    found = list(check_definitions(spec))
    methods = [statement.name for statement in spec.statements if isinstance(statement, ast.Method)]
    if any(applied(spec.statements)) or len(methods) > 1:
        for name in methods:
            found += _checked(only_method(spec, name))
            if any(error.code == "P120" for error in found):
                break  # what is too large is too large wherever it is applied
    if any(applied(spec.statements)) or len(methods) <= 1:
        found += _checked(spec)
    return _each_once(found)


def check(spec: ast.Spec) -> list[Diagnostic]:
    """Everything wrong with an expanded spec: P1xx, P205, P208, P302. Each names the text it is about."""
    shared = {s.name: s for s in spec.statements if isinstance(s, ast.Let) and is_shared(s.value)}
    found = [*check_structure(spec), *_twice_assigned(spec)]
    for statement in spec.statements:
        match statement:
            case ast.Edit():
                errors = [*check_selector(statement.selector), *check_edit(statement, shared)]
            case ast.Train():
                errors = [*check_selector(statement.selector), *_train(statement)]
            case ast.Let():
                errors = [*_shared(statement), *_unused(statement, spec)]
            case _:
                errors = []
        found += (said_of(error, statement, spec) for error in errors)
    return found


def _checked(spec: ast.Spec) -> list[Diagnostic]:
    """What is wrong with a file; of what follows from another error, nothing."""
    done = partial(spec, {})
    found = check(done.spec)
    if done.errors:
        found = [error for error in found if error.code not in _OF_WHOLE]
    unknown = [f"`{name}`" for name in done.broken]
    found = [
        error for error in found if not (error.code in _OF_NAMES and any(name in error.message for name in unknown))
    ]
    return [*done.errors, *found]


def _each_once(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """A method that is applied is seen twice: once as it is, once with its arguments."""
    kept: dict[object, Diagnostic] = {}
    for error in found:
        kept.setdefault((error.code, error.span, error.source and error.source.path, error.message), error)
    return sorted(kept.values(), key=lambda e: (e.source.path if e.source else "", e.span.start if e.span else -1))


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
    if let.name in FORMS or let.name in (*FROZEN, CONCAT):
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


def _unused(let: ast.Let, spec: ast.Spec) -> Iterator[Diagnostic]:
    values = (line.value for s in spec.statements if isinstance(s, ast.Edit) for line in s.body)
    if not any(isinstance(e, ast.Call) and e.function == let.name for value in values for e in expressions(value)):
        yield Diagnostic("P114", f"`{let.name}` is never used", let.span, help="remove it", severity="warning")


def _twice_assigned(spec: ast.Spec) -> Iterator[Diagnostic]:
    """P302: two edits that assign one state at sites that are written alike; the planner finds the others."""
    first: dict[tuple[str, str], ast.Edit] = {}
    for edit in (s for s in spec.statements if isinstance(s, ast.Edit)):
        places = (
            {selector(arm) for arm in arms(edit.selector)}
            if not _takes_away(edit.selector)
            else {selector(edit.selector)}
        )
        for line in edit.body:
            if not isinstance(line, ast.Equation) or line.op != "=":
                continue
            other = next((first[line.target, place] for place in sorted(places) if (line.target, place) in first), None)
            if other is not None and other is not edit:
                message = f"`{edit.name}` and `{other.name}` both assign `{line.target}` at one site"
                error = Diagnostic(
                    "P302",
                    message,
                    line.target_span,
                    help="write both equations in one edit, in the order that is meant",
                )
                yield said_of(error, edit, spec)
                continue
            first.update({(line.target, place): edit for place in places})


def _takes_away(selector: ast.Selector) -> bool:
    match selector:
        case ast.Difference():
            return True
        case ast.Union(parts):
            return any(map(_takes_away, parts))
        case _:
            return False
