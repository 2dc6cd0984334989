"""The parameters and constants of a file: named once, hiding nothing, used."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic
from peftc.semantics.vocabulary import STATES
from peftc.semantics.walk import is_shared, names_in, names_of
from peftc.syntax import ast


def check_definitions(spec: ast.Spec) -> Iterator[Diagnostic]:
    """P111, P114 and P121 about `method` and `let`."""
    for found in _definitions(spec):
        yield found.with_source(spec.source)


def _definitions(spec: ast.Spec) -> Iterator[Diagnostic]:
    used = set(names_of(spec.statements))
    applied = {s.name for s in spec.statements if isinstance(s, ast.Apply)} | {
        inner.name
        for s in spec.statements
        if isinstance(s, ast.Method)
        for inner in s.body
        if isinstance(inner, ast.Apply)
    }
    for statement in spec.statements:
        match statement:
            case ast.Method():
                yield from _method(statement)
            case ast.Let():
                yield from _constant(statement, used)
            case ast.Use(name) if name not in applied:
                yield Diagnostic(
                    "P114",
                    f"`{name}` is never applied",
                    statement.span,
                    help=f"add `apply {name}()`",
                    severity="warning",
                )
            case _:
                pass


def _method(method: ast.Method) -> Iterator[Diagnostic]:
    inside = set(names_of(method.body)) | {name for param in method.params for name in names_in(param.default)}
    seen: set[str] = set()
    for param in method.params:
        if param.name in seen:
            yield Diagnostic("P111", f"`{method.name}` has two parameters `{param.name}`", param.span)
        elif param.name in STATES:
            yield _hides(param.name, param.span)
        elif param.name not in inside:
            message = f"the parameter `{param.name}` of `{method.name}` is never used"
            yield Diagnostic("P114", message, param.span, help="remove it: whoever sets it would change nothing")
        seen.add(param.name)
    for let in (s for s in method.body if isinstance(s, ast.Let)):
        if let.name in seen:
            yield Diagnostic("P111", f"`{let.name}` is a parameter of `{method.name}` already", let.span)
        yield from _constant(let, inside)


def _constant(let: ast.Let, used: set[str]) -> Iterator[Diagnostic]:
    if let.name in STATES:
        yield _hides(let.name, let.span)
    elif let.name not in used and not is_shared(let.value):
        yield Diagnostic("P114", f"`{let.name}` is never used", let.span, help="remove it", severity="warning")


def _hides(name: str, span: ast.Span) -> Diagnostic:
    message = f"`{name}` is {STATES[name]}; nothing else can be called so"
    return Diagnostic("P121", message, span, help="use another name")
