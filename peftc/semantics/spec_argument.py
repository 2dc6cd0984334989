"""The `spec` argument of public functions: a path, a text or a parsed spec, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.semantics.expand import expand
from peftc.semantics.load import Include, read_spec
from peftc.semantics.settings import settings_from
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

SpecLike = str | PathLike[str] | ast.Spec
Settings = Mapping[str, object]  # of a method's parameters: numbers, booleans, expressions, texts as after `--set`


def flat_spec(spec: SpecLike, settings: Settings | None = None, include: Include = ()) -> ast.Spec:
    """The expanded spec."""
    return expand(spec_of(spec), settings_from(settings or {}), include)


def spec_of(spec: SpecLike) -> ast.Spec:
    """A parsed spec, from a path or a text. A text has a line break, or begins with `peft `."""
    if isinstance(spec, ast.Spec):
        return spec
    if not isinstance(spec, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        raise PeftcError(Diagnostic("P545", f"a spec is a path, a text or a parsed Spec, not a {type(spec).__name__}"))
    return parse_text(fspath(spec)) if is_text(spec) else read_spec(fspath(spec))


def default_name(spec: SpecLike) -> str:
    """The name of a spec's file without the ending, or `default`."""
    path = spec.source.path if isinstance(spec, ast.Spec) else "<text>" if is_text(spec) else fspath(spec)
    return "default" if path.startswith("<") else Path(path).stem


def is_text(spec: str | PathLike[str]) -> bool:
    return isinstance(spec, str) and (not spec or "\n" in spec or spec.lstrip().startswith("peft "))
