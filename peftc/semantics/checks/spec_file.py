"""`peftc check`: all errors of a file in one run, without a model."""

from __future__ import annotations

from collections.abc import Iterable

from peftc.diagnostics import Diagnostic
from peftc.semantics.checks.definitions import check_definitions
from peftc.semantics.expand import BUDGET, Expander, expand_valid
from peftc.semantics.load import Folders, Include, folders_of
from peftc.semantics.scope import ScopeReader, changes_model
from peftc.syntax import ast

_BUDGET = 20 * BUDGET  # statements of all methods


def check_file(spec: ast.Spec, include: Include = ()) -> list[Diagnostic]:
    """All errors of a file: its definitions, what it applies, and its methods. See `expand`."""
    folders = folders_of(spec, include)
    errors = list(check_definitions(spec))
    methods = [statement for statement in spec.statements if isinstance(statement, ast.Method)]
    if changes_model(spec.statements) or len(methods) > 1:
        errors += _each_method(spec, methods, folders)
    if changes_model(spec.statements) or len(methods) <= 1:
        errors += expand_valid(spec, {}, folders)[1]
    return _without_duplicates(errors)


def _each_method(spec: ast.Spec, methods: Iterable[ast.Method], folders: Folders) -> list[Diagnostic]:
    """The errors of each method with its defaults, and of the shared parameters."""
    reader = ScopeReader(folders)
    scope = reader.read(spec, {})
    expander = Expander(reader, scope, {})
    errors = [error for error in expander.diagnostics(expander.shared()) if error.code != "P114"]
    budget = _BUDGET
    for method in methods:
        if budget <= 0:
            message = f"checking the methods of this file takes more than {_BUDGET} statements"
            errors.append(Diagnostic("P120", message, method.span, spec.source, help="split the file"))
            break
        expander = Expander(reader, scope, {})
        errors += expander.diagnostics(expander.method(method.name))
        budget -= expander.cost
        if expander.cost >= BUDGET:
            break  # each method that applies this one is too large as well
    return [*reader.errors, *errors]


def _without_duplicates(errors: Iterable[Diagnostic]) -> list[Diagnostic]:
    """An applied method is checked twice, with its defaults and with its arguments."""
    unique: dict[object, Diagnostic] = {}
    for error in errors:
        unique.setdefault((error.code, error.span, error.source and error.source.path, error.message), error)
    return sorted(unique.values(), key=lambda e: (e.source.path if e.source else "", e.span.start if e.span else -1))
