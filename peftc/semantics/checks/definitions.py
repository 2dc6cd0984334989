"""Checks of the definitions in a file: unique names, no reserved names, no unused parameters."""

from collections.abc import Iterator

from peftc.diagnostics import Diagnostic, Span
from peftc.equations.table import form_errors
from peftc.syntax import ast
from peftc.syntax.vocabulary import STATES, state_name
from peftc.syntax.walk import changes_model, is_shared, names_in_selectors, names_in_statements


def check_definitions(spec: ast.Spec) -> Iterator[Diagnostic]:
    """P111, P114 and P121 of `method`, `let` and `use`."""
    return (diagnostic.with_source(spec.source) for diagnostic in _definitions(spec))


def _definitions(spec: ast.Spec) -> Iterator[Diagnostic]:
    yield from form_errors(spec)
    used = set(names_in_statements(spec.statements))
    inner = (s for method in spec.statements if isinstance(method, ast.Method) for s in method.body)
    in_selectors = set(names_in_selectors(spec.statements))
    applied = {s.name for s in (*spec.statements, *inner) if isinstance(s, ast.Apply)}
    applies = changes_model(spec.statements)
    for statement in spec.statements:
        match statement:
            case ast.Method(name):
                yield from _method(statement)
                if applies and name not in applied:
                    yield not_applied(name, statement.span)
            case ast.Let():
                yield from _let(statement, used)
            case ast.SiteGroup(name) if name not in in_selectors:
                yield unused(statement)
            case ast.Use(name) if name not in applied and name not in used:
                yield not_applied(name, statement.span)
            case _:
                pass


def _method(method: ast.Method) -> Iterator[Diagnostic]:
    used = set(names_in_statements([method]))
    seen: set[str] = set()
    for param in method.params:
        if param.name in seen:
            yield Diagnostic("P111", f"`{method.name}` has two parameters `{param.name}`", param.span)
        elif param.name in STATES:
            yield reserved(param.name, param.span)
        elif param.name not in used:
            message = f"the parameter `{param.name}` of `{method.name}` is never used"
            yield Diagnostic("P114", message, param.span, help="remove it: setting it would have no effect")
        seen.add(param.name)
    for let in (s for s in method.body if isinstance(s, ast.Let)):
        if let.name in seen:
            yield Diagnostic("P111", f"`{let.name}` is already a parameter of `{method.name}`", let.span)
        yield from _let(let, used)
    in_selectors = set(names_in_selectors(method.body))
    yield from (unused(s) for s in method.body if isinstance(s, ast.SiteGroup) and s.name not in in_selectors)


def _let(let: ast.Let, used: set[str]) -> Iterator[Diagnostic]:
    if let.name in STATES:
        yield reserved(let.name, let.span)
    elif let.name not in used and not is_shared(let.value):
        yield unused(let)


# Errors that several checks report


def unused(let: ast.Let | ast.SiteGroup) -> Diagnostic:
    return Diagnostic("P114", f"`{let.name}` is never used", let.span, help="remove it", severity="warning")


def not_applied(name: str, span: Span) -> Diagnostic:
    return Diagnostic("P114", f"`{name}` is never applied", span, help=f"add `apply {name}()`", severity="warning")


def bound_twice(let: ast.Let) -> Diagnostic:
    return Diagnostic("P111", f"`{let.name}` is bound twice", let.span, help="give one of them another name")


def reserved(state: str, span: Span) -> Diagnostic:
    return Diagnostic("P121", state_name(state), span, help="use another name")
