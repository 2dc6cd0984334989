"""What `peftc check` says of a file; several errors in one run."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.diagnostics import Diagnostic
from peftc.semantics.check_definitions import check_definitions
from peftc.semantics.expand import only_method, partial
from peftc.semantics.scope import applied
from peftc.syntax import ast


def check_file(spec: ast.Spec) -> list[Diagnostic]:
    """Everything wrong with a file as it was written: its definitions, what it applies, and each of its methods."""
    found = list(check_definitions(spec))
    methods = [statement.name for statement in spec.statements if isinstance(statement, ast.Method)]
    if any(applied(spec.statements)) or len(methods) > 1:
        for name in methods:
            found += partial(only_method(spec, name), {}).found
            if any(error.code == "P120" for error in found):
                break  # what is too large is too large wherever it is applied
    if any(applied(spec.statements)) or len(methods) <= 1:
        found += partial(spec, {}).found
    return _each_once(found)


def _each_once(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """A method that is applied is seen twice: once as it is, once with its arguments."""
    kept: dict[object, Diagnostic] = {}
    for error in found:
        kept.setdefault((error.code, error.span, error.source and error.source.path, error.message), error)
    return sorted(kept.values(), key=lambda e: (e.source.path if e.source else "", e.span.start if e.span else -1))
