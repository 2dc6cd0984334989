"""`--set name=value` and Python values, to the expressions that `expand` takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.constants import fold_constants
from peftc.syntax import ast
from peftc.syntax.parser import parse_expression


def parse_settings(settings: Iterable[str]) -> dict[str, ast.Expr]:
    """Parses `["r=256", "reparam=mlp(800)"]`.

    Raises: PeftcError P110 for a malformed setting or a duplicate name, P0xx for a malformed value.
    """
    values: dict[str, ast.Expr] = {}
    errors: list[Diagnostic] = []
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            errors.append(Diagnostic("P110", f"--set {setting}: expected `name=value`", help="e.g. `--set r=256`"))
        elif name in values:
            errors.append(Diagnostic("P110", f"--set {setting}: `{name}` is set twice"))
        else:
            try:
                values[name] = fold_constants(parse_expression(value, f"--set {name}"))
            except PeftcError as error:
                errors += error.diagnostics
    if errors:
        raise PeftcError(errors)
    return values


def settings_from(values: Mapping[str, object]) -> dict[str, ast.Expr]:
    """Settings from Python: `{"r": 256, "bias": False, "reparam": "mlp(800)"}`, or expressions.

    Raises: as `parse_settings`.
    """
    literals = {name: _literal(value) for name, value in values.items() if not isinstance(value, ast.Node)}
    parsed = parse_settings(f"{name}={text}" for name, text in literals.items())
    return {name: value if isinstance(value, ast.Expr) else parsed[name] for name, value in values.items()}


def _literal(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
