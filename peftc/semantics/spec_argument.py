"""The `spec` argument of public functions: a path, a text or a parsed spec, and its settings."""

import re
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import SPEC_FIRST
from peftc.semantics.expand import expand
from peftc.semantics.files import Include, read_spec
from peftc.semantics.substitute import fold_constants
from peftc.syntax import ast
from peftc.syntax.lexer import is_text
from peftc.syntax.parser import parse_expression, parse_text

SpecLike = str | PathLike[str] | ast.Spec
Settings = Mapping[str, object]  # of a method's parameters: numbers, booleans, expressions, texts as after `--set`


def flat_spec(spec: SpecLike, settings: Settings | None = None, include: Include = ()) -> ast.Spec:
    """The expanded spec."""
    return expand(spec_of(spec), settings_from(settings or {}), include)


def spec_of(spec: SpecLike) -> ast.Spec:
    """A parsed spec, from a path or a text. `is_text` tells them apart."""
    if isinstance(spec, ast.Spec):
        return spec
    if not isinstance(spec, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"a spec is a path, a text or a parsed Spec, not a {type(spec).__name__}"
        raise PeftcError(Diagnostic("P545", message, help=SPEC_FIRST))
    return parse_text(fspath(spec)) if is_text(spec) else read_spec(fspath(spec))


def default_name(spec: SpecLike) -> str:
    """The name of a spec's file without the ending, or `default`."""
    path = spec.source.path if isinstance(spec, ast.Spec) else "<text>" if is_text(spec) else fspath(spec)
    return "default" if path.startswith("<") else Path(path).stem


def parse_settings(settings: Iterable[str]) -> dict[str, ast.Expr]:
    """Parses `["r=256", "reparam=mlp(800)"]`. Raises: PeftcError P110; P0xx for a value."""
    values: dict[str, ast.Expr] = {}
    errors: list[Diagnostic] = []
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            errors.append(Diagnostic("P110", f"setting `{setting}`: expected `name=value`", help="e.g. `--set r=256`"))
        elif name in values:
            errors.append(Diagnostic("P110", f"setting `{setting}`: `{name}` is set twice"))
        else:
            try:
                values[name] = fold_constants(parse_expression(value, f"setting {name}"))
            except PeftcError as error:
                errors += error.diagnostics
    if errors:
        raise PeftcError(errors)
    return values


def settings_from(values: Mapping[str, object]) -> dict[str, ast.Expr]:
    """Settings from Python: `{"r": 256, "bias": False, "reparam": "mlp(800)"}`, or expressions."""
    literals = {name: value for name, value in values.items() if not isinstance(value, ast.Node)}
    words = {name: str(value).lower() for name, value in literals.items() if value is None or isinstance(value, bool)}
    parsed = parse_settings(f"{name}={words.get(name, value)}" for name, value in literals.items())
    return {name: value if isinstance(value, ast.Expr) else parsed[name] for name, value in values.items()}
