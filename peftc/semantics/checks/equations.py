"""Checks of the equations of an edit, without a model: defined names, calls that fit forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from peftc.diagnostics import Diagnostic, PeftcError, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms import FORMS
from peftc.semantics.arguments import bind
from peftc.semantics.checks.definitions import unused
from peftc.semantics.checks.selectors import sites_without
from peftc.semantics.vocabulary import CONCAT, FROZEN_MODULES, SHARED, STATES
from peftc.semantics.walk import children
from peftc.syntax import ast
from peftc.syntax.print_expressions import print_expression

Shared = Mapping[str, ast.Let]
_OWNERS = {  # state -> a site that has it, and an example
    **dict.fromkeys("wb", ("a Linear", "layer[*].attn.q")),
    **dict.fromkeys(("kv", "c"), ("an attention", "layer[*].attn")),
    "z": ("an ffn", "layer[*].ffn"),
}


def check_edit(edit: ast.Edit, shared: Shared) -> Iterator[Diagnostic]:
    """All errors in the body of an edit."""
    return _EquationChecker(edit.selector, shared).errors(edit.body)


class _EquationChecker:
    """Checks the lines of an edit in order, since a `let` is in scope after its line."""

    def __init__(self, selector: ast.Selector, shared: Shared) -> None:
        self._selector = selector
        self._shared = shared
        self._local: dict[str, ast.Let] = {}
        self._used: set[str] = set()
        self._states: set[str] = set()  # checked ones, each of which is reported once

    def errors(self, body: Iterable[ast.Equation | ast.Let]) -> Iterator[Diagnostic]:
        for line in body:
            yield from self._value(line.value)
            if isinstance(line, ast.Let):
                self._local[line.name] = line
            elif line.target in self._local:
                message = f"`{line.target}` is bound by `let`; an equation assigns a state"
                yield Diagnostic("P107", message, line.target_span)
            else:
                yield from self._state(line.target, line.target_span, is_target=True)
        yield from (unused(let) for name, let in self._local.items() if name not in self._used)

    def _state(self, name: str, span: Span, is_target: bool) -> Iterator[Diagnostic]:
        if name not in STATES:
            help_ = did_you_mean(name, STATES if is_target else (*STATES, *self._local))
            if help_ is None and (is_target or not self._local):
                help_ = f"the states are {join_names(STATES)}"
            if name in FORMS or name in self._shared or name in (*FROZEN_MODULES, CONCAT):
                help_ = f"`{name}` is a function: call it, `{name}(…)`"
            yield Diagnostic("P107", f"there is no {'state' if is_target else 'name'} `{name}`", span, help=help_)
        elif name not in self._states:
            self._states.add(name)
            sites = list(dict.fromkeys(sites_without(self._selector, name)))
            if sites:
                verb = "have" if len(sites) > 1 else "has"
                owner, example = _OWNERS.get(name, ("other sites", "layer[*].attn"))
                message = f"{join_names(sites)} {verb} no state `{name}`, {STATES[name]}"
                yield Diagnostic("P205", message, span, help=f"it is a state of {owner}, e.g. of `{example}`")

    def _value(self, value: ast.Expr) -> Iterator[Diagnostic]:
        match value:
            case ast.Name(name) if name in self._local:
                self._used.add(name)
            case ast.Name(name):
                yield from self._state(name, value.span, is_target=False)
            case ast.Call():
                yield from self._call(value)
            case ast.Negative() | ast.Binary():
                for operand in children(value):
                    yield from self._value(operand)
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
            yield from bind_errors(call)
        elif call.function in (*FROZEN_MODULES, CONCAT):
            yield from _builtin_call(call)
        elif call.function == SHARED:
            help_ = "bind it outside: `let NAME = shared(…)`; parameters inside an edit belong to one site"
            message = "`shared` stands in a `let` outside of edits"
            yield Diagnostic("P115", message, call.function_span, help=help_)
        else:
            yield unknown_form(call, self._shared)

    def _shared_call(self, call: ast.Call) -> Iterator[Diagnostic]:
        for keyword in call.kwargs:
            message = f"the arguments of `{call.function}` stand where it is bound"
            yield Diagnostic("P102", message, keyword.span, help="remove it here")
        bound = self._shared[call.function].value
        inner = bound.args[0] if isinstance(bound, ast.Call) and bound.args else None
        form = FORMS.get(inner.function) if isinstance(inner, ast.Call) else None
        if form is not None and len(call.args) != form.takes_input:
            inputs = "one input" if form.takes_input else "no input"
            yield Diagnostic("P108", f"`{call.function}` takes {inputs}, found {len(call.args)}", call.span)


def bind_errors(call: ast.Call, shared: bool = False) -> Iterator[Diagnostic]:
    """The errors of `bind` for a call of a form."""
    try:
        bind(call, FORMS[call.function], shared=shared)
    except PeftcError as error:
        yield from error.diagnostics


def _builtin_call(call: ast.Call) -> Iterator[Diagnostic]:
    """Errors of `concat(…)`, `norm(…)` and `head(…)`, which have no named arguments."""
    for keyword in call.kwargs:
        yield Diagnostic("P102", f"`{call.function}` has no argument `{keyword.name}`", keyword.span)
    is_concat = call.function == CONCAT
    if len(call.args) < 2 if is_concat else len(call.args) != 1:
        inputs = "two or more parts" if is_concat else "one input"
        yield Diagnostic("P108", f"`{call.function}` takes {inputs}, found {len(call.args) or 'none'}", call.span)


def unknown_form(call: ast.Call, shared: Shared) -> Diagnostic:
    """P101, with the most similar form."""
    suggestion = did_you_mean(call.function, (*FORMS, CONCAT, *FROZEN_MODULES, *shared))
    help_ = suggestion or f"the forms are {join_names(sorted(FORMS))}"
    return Diagnostic("P101", f"there is no form `{call.function}`", call.function_span, help=help_)
