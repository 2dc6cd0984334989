"""What `peftc check` says of a file; several errors in one run."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.diagnostics import Diagnostic
from peftc.semantics.checks.definitions import check_definitions
from peftc.semantics.expand import MOST, Expansion, partial
from peftc.semantics.load import Folders, Include, folders_of
from peftc.semantics.scope import Scopes, applied
from peftc.syntax import ast

_MOST = 20 * MOST  # statements of all methods


def check_file(spec: ast.Spec, include: Include = ()) -> list[Diagnostic]:
    """Everything wrong with a file as it was written: its definitions, what it applies, and each of its methods.

    Args: `include`: as in `expand`.
    """
    folders = folders_of(spec, include)
    found = list(check_definitions(spec))
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    if any(applied(spec.statements)) or len(methods) > 1:
        found += _each_method(spec, methods, folders)
    if any(applied(spec.statements)) or len(methods) <= 1:
        found += partial(spec, {}, folders).found
    return _each_once(found)


def _each_method(spec: ast.Spec, methods: Iterable[ast.Method], folders: Folders) -> list[Diagnostic]:
    """What is wrong with methods by themselves, each with its defaults, and with what they share."""
    scopes = Scopes(folders)
    scope = scopes.of(spec, {})
    sharing = Expansion(scopes, scope, {})
    found = [error for error in sharing.found(sharing.shared()) if error.code != "P114"]
    left = _MOST
    for method in methods:
        if left <= 0:
            message = f"checking the methods of this file takes more than {_MOST} statements"
            found.append(Diagnostic("P120", message, method.span, spec.source, help="make files of them"))
            break
        expansion = Expansion(scopes, scope, {})
        found += expansion.found(expansion.method(method.name))
        left -= expansion.cost
        if expansion.cost >= MOST:
            break  # what is too large is too large wherever it is applied
    return [*scopes.errors, *found]


def _each_once(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """A method that is applied is seen twice: once as it is, once with its arguments."""
    kept: dict[object, Diagnostic] = {}
    for error in found:
        kept.setdefault((error.code, error.span, error.source and error.source.path, error.message), error)
    return sorted(kept.values(), key=lambda e: (e.source.path if e.source else "", e.span.start if e.span else -1))
