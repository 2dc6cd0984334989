"""Reads specs from files, and resolves the files of `use`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.filesystem.bounded_read import check_path, printable_path, read_regular
from peftc.syntax import ast
from peftc.syntax.lexer import begins_as_spec
from peftc.syntax.parser import parse_text

MAX_BYTES = 1_000_000  # of a spec

Include = Iterable[str | PathLike[str]] | None


def read_text(path: str | Path) -> str:
    """The text of a spec file. Raises: PeftcError P024, P026, P027, OSError."""
    return decode(read_regular(path, MAX_BYTES), str(path))


def decode(data: bytes, path: str) -> str:
    """The bytes of a spec as text. Raises: PeftcError P024, P027."""
    if len(data) > MAX_BYTES:
        raise PeftcError(Diagnostic("P027", f"{path} is larger than {MAX_BYTES:,} bytes"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        valid = data[: error.start].decode("utf-8")
        line, column = valid.count("\n") + 1, len(valid) - valid.rfind("\n")
        at = Span(len(valid), len(valid) + 1, line, column, line, column + 1)
        source = Source(path, data.decode("utf-8", errors="replace"))
        message = f"byte {error.start} is not UTF-8"
        raise PeftcError(Diagnostic("P024", message, at, source, help="save the file as UTF-8")) from None


def read_spec(path: str | PathLike[str]) -> ast.Spec:
    """Parses a spec file. Raises: PeftcError P024, P026, P027, P0xx, P112 (it cannot be read)."""
    try:
        text = read_text(Path(path))
    except OSError as error:
        raise _unreadable(Path(path), error) from None
    return parse_text(text, os.fspath(path))


def read_used_spec(path: Path) -> ast.Spec:
    """Parses a file that a spec uses. No message shows the content of a file that is not a spec.

    Raises: as `read_spec`, and PeftcError P125 if the file does not begin as a spec.
    """
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not begins_as_spec(data.decode("utf-8", errors="replace")):
        help_ = "a spec begins with `peft 1`; the content of other files is not shown"
        raise PeftcError(Diagnostic("P125", f"{printable_path(path)} is not a spec", help=help_))
    return parse_text(decode(data, str(path)), str(path))


def _unreadable(path: Path, error: OSError) -> PeftcError:
    names = [file.name for file in path.parent.glob("*.peft")] if os.path.isdir(path.parent) else []
    message = f"cannot read {printable_path(path)}: {error.strerror or error}"
    return PeftcError(Diagnostic("P112", message, help=did_you_mean(path.name, names)))


@dataclass(frozen=True)
class Folders:
    """The folders in which `use` may read: that of the spec, if any, and those of the user."""

    own: Path | None
    include: tuple[Path, ...] = ()

    def find(self, file: str, folder: Path) -> Path:
        """The real path of `file`, named in a spec in `folder`. Raises: PeftcError P123, P026."""
        check_path(file)
        roots = (*([] if self.own is None else [self.own]), *self.include)
        candidates = [Path(os.path.realpath(base / file)) for base in (folder, *self.include)]
        allowed = [path for path in candidates if any(path.is_relative_to(root) for root in roots)]
        if allowed:
            return next((path for path in allowed if os.path.exists(path)), allowed[0])
        message = f"`{printable_path(file)}` is outside the allowed folders"
        note = f"files are read within {join_names(map(str, roots))}" if roots else "this spec may not use files"
        help_ = None if self.own is None else "add the folder: `--include DIR`, in Python `include=[…]`"
        raise PeftcError(Diagnostic("P123", message, notes=(note,), help=help_))


def folders_of(spec: ast.Spec, include: Include) -> Folders:
    """The folder of a spec, and `include`; none if that is None. Raises: PeftcError P124."""
    if include is None:
        return Folders(None)
    names = [include] if isinstance(include, str | PathLike) else list(include)
    for name in names:
        if not os.path.isdir(name):
            message = f"`{printable_path(name)}` is not a folder"
            raise PeftcError(Diagnostic("P124", message, help="`--include` names a folder"))
    return Folders(path_of(spec).parent, tuple(Path(os.path.realpath(name)) for name in names))


def path_of(spec: ast.Spec) -> Path:
    """The file of a spec, with symbolic links resolved."""
    return Path(os.path.realpath(spec.source.path.replace("\0", "")))
