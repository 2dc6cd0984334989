"""The equations of an edit, without a model: every name means something, every call fits its form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms import FORMS
from peftc.semantics.arguments import bind
from peftc.semantics.checks.selectors import states_missing
from peftc.semantics.vocabulary import CONCAT, FROZEN_MODULES, SHARED, STATES
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

Shared = Mapping[str, ast.Let]


def check_edit(edit: ast.Edit, shared: Shared) -> Iterator[Diagnostic]:
    """Everything that is wrong with the body of an edit."""
    equations = Equations(edit.selector, shared)
    for line in edit.body:
        yield from equations.line(line)
    yield from equations.unused()


class Equations:
    """Checks lines in order, since `let` names what follows."""

    def __init__(self, selector: ast.Selector, shared: Shared) -> None:
        self._selector = selector
        self._shared = shared
        self._local: dict[str, ast.Let] = {}
        self._used: set[str] = set()
        self._seen: set[str] = set()  # states

    def line(self, line: ast.Equation | ast.Let) -> Iterator[Diagnostic]:
        yield from self._value(line.value)
        if isinstance(line, ast.Let):
            self._local[line.name] = line
        else:
            yield from self._target(line)

    def unused(self) -> Iterator[Diagnostic]:
        for name, let in self._local.items():
            if name not in self._used:
                yield Diagnostic("P114", f"`{name}` is never used", let.span, help="remove it", severity="warning")

    def _target(self, line: ast.Equation) -> Iterator[Diagnostic]:
        name = line.target
        if name in self._local:
            yield Diagnostic("P107", f"`{name}` is bound by `let`; an equation writes a state", line.target_span)
        else:
            yield from self._state(name, line.target_span, "state")

    def _state(self, name: str, span: ast.Span, what: str) -> Iterator[Diagnostic]:
        if name not in STATES:
            meant = did_you_mean(name, chain(STATES, self._local) if what == "name" else STATES)
            help_ = meant or (
                f"the states are {join_names(STATES)}" if what == "state" or len(self._local) == 0 else None
            )
            if name in FORMS or name in self._shared or name in (*FROZEN_MODULES, CONCAT):
                help_ = f"`{name}` is a function: call it, `{name}(…)`"
            yield Diagnostic("P107", f"there is no {what} `{name}`", span, help=help_)
            return
        if name in self._seen:
            return
        self._seen.add(name)
        missing = list(dict.fromkeys(states_missing(self._selector, name)))
        if missing:
            message = f"{join_names(missing)} {'have' if len(missing) > 1 else 'has'} no state `{name}`, {STATES[name]}"
            yield Diagnostic("P205", message, span, help=_elsewhere(name))

    def _value(self, value: ast.Expr) -> Iterator[Diagnostic]:
        match value:
            case ast.Name(name) if name in self._local:
                self._used.add(name)
            case ast.Name(name):
                yield from self._state(name, value.span, "name")
            case ast.Call():
                yield from self._call(value)
            case ast.Negative(operand):
                yield from self._value(operand)
            case ast.Binary(_, left, right):
                yield from self._value(left)
                yield from self._value(right)
            case ast.Boolean() | ast.String():
                message = f"expected a hidden state or a number, found `{print_expression(value)}`"
                yield Diagnostic("P105", message, value.span)
            case ast.Number():
                pass

    def _call(self, call: ast.Call) -> Iterator[Diagnostic]:
        for arg in call.args if call.function != SHARED else ():
            yield from self._value(arg)
        if call.function in self._shared:
            yield from self._shared_call(call)
        elif call.function in FORMS:
            yield from _bound(call)
        elif call.function in (*FROZEN_MODULES, CONCAT):
            yield from _plain_call(call)
        elif call.function == SHARED:
            help_ = "bind it outside: `let NAME = shared(…)`; inside an edit every site has its own parameters"
            yield Diagnostic("P115", "`shared` stands in a `let` outside of edits", call.function_span, help=help_)
        else:
            yield unknown_form(call, self._shared)

    def _shared_call(self, call: ast.Call) -> Iterator[Diagnostic]:
        yield from (
            Diagnostic(
                "P102",
                f"the arguments of `{call.function}` stand where it is bound",
                keyword.span,
                help="leave this out",
            )
            for keyword in call.kwargs
        )
        form = shared_form(self._shared[call.function])
        wanted = 1 if form in FORMS and FORMS[form].takes_input else 0
        if form in FORMS and len(call.args) != wanted:
            message = f"`{call.function}` takes {'one input' if wanted else 'no input'}, found {len(call.args)}"
            yield Diagnostic("P108", message, call.span)


def _elsewhere(state: str) -> str:
    where = {"w": "a Linear", "b": "a Linear", "kv": "an attention", "c": "an attention", "z": "an ffn"}
    example = {"w": "layer[*].attn.q", "b": "layer[*].attn.q", "z": "layer[*].ffn"}.get(state, "layer[*].attn")
    return f"it is a state of {where.get(state, 'other sites')}, e.g. of `{example}`"


def _bound(call: ast.Call) -> Iterator[Diagnostic]:
    try:
        bind(call, FORMS[call.function])
    except PeftcError as error:
        yield from error.diagnostics


def _plain_call(call: ast.Call) -> Iterator[Diagnostic]:
    """`concat(…)`, `norm(…)`: no named arguments."""
    for keyword in call.kwargs:
        yield Diagnostic("P102", f"`{call.function}` has no argument `{keyword.name}`", keyword.span)
    wanted = "two or more parts" if call.function == CONCAT else "one input"
    if len(call.args) < 2 if call.function == CONCAT else len(call.args) != 1:
        message = f"`{call.function}` takes {wanted}, found {len(call.args) or 'none'}"
        yield Diagnostic("P108", message, call.span)


def unknown_form(call: ast.Call, shared: Shared) -> Diagnostic:
    """P101, with the nearest form."""
    help_ = (
        did_you_mean(call.function, chain(FORMS, [CONCAT], FROZEN_MODULES, shared))
        or f"the forms are {join_names(sorted(FORMS))}"
    )
    return Diagnostic("P101", f"there is no form `{call.function}`", call.function_span, help=help_)


def shared_form(let: ast.Let) -> str:
    """The form that a shared `let` holds; "" where it holds none."""
    value = let.value
    inner = value.args[0] if isinstance(value, ast.Call) and value.args else None
    return inner.function if isinstance(inner, ast.Call) else ""
