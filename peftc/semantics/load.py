"""Specs from files."""

from __future__ import annotations

from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.diagnostics.suggestions import did_you_mean
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

LARGEST = 1_000_000  # bytes of a spec


def read_text(path: str | Path) -> str:
    """The text of a spec. Raises: PeftcError P024 where it is not text, OSError where it cannot be read."""
    return decoded(Path(path).read_bytes(), str(path))


def decoded(data: bytes, path: str) -> str:
    """The bytes of a spec as text. Raises: PeftcError P024."""
    if len(data) > LARGEST:
        raise PeftcError(Diagnostic("P024", f"{path} has {len(data)} bytes; a spec has at most {LARGEST}"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        good = data[: error.start].decode("utf-8")
        line, column = good.count("\n") + 1, len(good) - good.rfind("\n")
        at = Span(len(good), len(good) + 1, line, column, line, column + 1)
        source = Source(path, data.decode("utf-8", errors="replace"))
        message = f"byte {error.start} is not UTF-8"
        raise PeftcError(Diagnostic("P024", message, at, source, help="save the file as UTF-8")) from None


def read_spec(path: str | Path) -> ast.Spec:
    """The spec in a file.

    Raises:
        PeftcError: P024 and P0xx; P112 where there is no such file.
    """
    try:
        text = read_text(path)
    except OSError as error:
        there = [found.name for found in Path(path).parent.glob("*.peft")] if Path(path).parent.is_dir() else []
        help_ = did_you_mean(Path(path).name, there)
        raise PeftcError(Diagnostic("P112", f"cannot read {path}: {error.strerror or error}", help=help_)) from None
    return parse_text(text, str(path))
