"""`--set name=value`, as texts or from Python, to the expressions that `expand` takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.constants import fold
from peftc.syntax import ast
from peftc.syntax.parser import parse_expression


def parse_settings(settings: Iterable[str]) -> dict[str, ast.Expr]:
    """`["r=256", "reparam=mlp(800)"]` by name.

    Raises: PeftcError P110 for what is no `name=value` or names something twice, P0xx for a value that is no expression.
    """
    found: dict[str, ast.Expr] = {}
    errors: list[Diagnostic] = []
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            errors.append(Diagnostic("P110", f"--set {setting}: expected `name=value`", help="e.g. `--set r=256`"))
        elif name in found:
            errors.append(Diagnostic("P110", f"--set {setting}: `{name}` is set twice"))
        else:
            try:
                found[name] = computed(parse_expression(value, f"--set {name}"))
            except PeftcError as error:
                errors += error.diagnostics
    if errors:
        raise PeftcError(errors)
    return found


def computed(value: ast.Expr) -> ast.Expr:
    """A value with its arithmetic on constant numbers done."""
    match value:
        case ast.Binary(left=left, right=right):
            return fold(replace(value, left=computed(left), right=computed(right)))
        case ast.Negative(operand=operand):
            return fold(replace(value, operand=computed(operand)))
        case _:
            return value


def settings_from(values: Mapping[str, object]) -> dict[str, ast.Expr]:
    """`{"r": 256, "bias": False, "reparam": "mlp(800)"}` by name; expressions are taken as they are.

    Raises: as `parse_settings`.
    """
    texts = {name: said(value) for name, value in values.items() if not isinstance(value, ast.Node)}
    parsed = parse_settings(f"{name}={text}" for name, text in texts.items())
    return {name: value if isinstance(value, ast.Expr) else parsed[name] for name, value in values.items()}


def said(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
