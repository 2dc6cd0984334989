"""Specs from files, and the folders that `use` may read from."""

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

LARGEST = 1_000_000  # bytes of a spec


def read_text(path: str | Path) -> str:
    """The text of a spec.

    Raises: PeftcError P024 where it is not text, P026 (no regular file), P027 (too large), OSError where it cannot be read.
    """
    return decode(read_regular(path, LARGEST), str(path))


def decode(data: bytes, path: str) -> str:
    """The bytes of a spec as text. Raises: PeftcError P024, P027."""
    if len(data) > LARGEST:
        raise PeftcError(Diagnostic("P027", f"{path} has more than {LARGEST:,} bytes; a spec has fewer"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        good = data[: error.start].decode("utf-8")
        line, column = good.count("\n") + 1, len(good) - good.rfind("\n")
        at = Span(len(good), len(good) + 1, line, column, line, column + 1)
        source = Source(path, data.decode("utf-8", errors="replace"))
        message = f"byte {error.start} is not UTF-8"
        raise PeftcError(Diagnostic("P024", message, at, source, help="save the file as UTF-8")) from None


def read_spec(path: str | PathLike[str]) -> ast.Spec:
    """The spec in a file.

    Raises:
        PeftcError: P024, P026, P027 and P0xx; P112 where there is no such file.
    """
    try:
        text = read_text(Path(path))
    except OSError as error:
        raise missing(Path(path), error) from None
    return parse_text(text, os.fspath(path))


def missing(path: Path, error: OSError) -> PeftcError:
    """P112, with the nearest name."""
    there = [found.name for found in path.parent.glob("*.peft")] if os.path.isdir(path.parent) else []
    help_ = did_you_mean(path.name, there)
    return PeftcError(Diagnostic("P112", f"cannot read {printable_path(path)}: {error.strerror or error}", help=help_))


# `use` ---------------------------------------------------------------------------------------------------------------

Include = Iterable[str | PathLike[str]] | None


@dataclass(frozen=True)
class Folders:
    """Where the files of `use` may be: `own`, the folder of the spec (None: nowhere), and those that the user names."""

    own: Path | None
    include: tuple[Path, ...] = ()

    @property
    def all(self) -> tuple[Path, ...]:
        return (*([] if self.own is None else [self.own]), *self.include)

    def find(self, source: str, folder: Path) -> Path:
        """The file that `source` names in a spec that lies in `folder`: the first there is, symbolic links followed.

        Raises: PeftcError P123 where it is not within these folders, P026 where it is no path.
        """
        check_path(source)
        candidates = [Path(os.path.realpath(base / source)) for base in (folder, *self.include)]
        allowed = [path for path in candidates if any(path.is_relative_to(root) for root in self.all)]
        if allowed:
            return next((path for path in allowed if os.path.exists(path)), allowed[0])
        known = f"files are read within {join_names(map(str, self.all))}" if self.all else "this spec may use no files"
        help_ = None if self.own is None else "name the folder: `--include DIR`, in Python `include=[…]`"
        raise PeftcError(Diagnostic("P123", f"`{printable_path(source)}` is outside", notes=(known,), help=help_))


def folders_of(spec: ast.Spec, include: Include) -> Folders:
    """The folder of a spec (for one that is no file, the working directory) and those of `include`, where it is not None.

    Raises: PeftcError P124 where one of them is no folder.
    """
    if include is None:
        return Folders(None)
    names = [include] if isinstance(include, str | PathLike) else list(include)
    wrong = [os.fspath(name) for name in names if not os.path.isdir(name)]
    if wrong:
        raise PeftcError(
            Diagnostic("P124", f"`{printable_path(wrong[0])}` is no folder", help="`--include` names a folder")
        )
    return Folders(folder_of(spec), tuple(Path(os.path.realpath(name)) for name in names))


def path_of(spec: ast.Spec) -> Path:
    """The file of a spec, symbolic links followed."""
    return Path(os.path.realpath(spec.source.path.replace("\0", "")))


def folder_of(spec: ast.Spec) -> Path:
    return path_of(spec).parent


def read_used(path: Path) -> ast.Spec:
    """The spec that another one uses. What is no spec is not shown: whoever wrote the `use` may not be who runs it.

    Raises: as `read_spec`; PeftcError P125 where the file does not begin as specs do.
    """
    try:
        data = read_regular(path, LARGEST)
    except OSError as error:
        raise missing(path, error) from None
    if not begins_as_spec(data.decode("utf-8", errors="replace")):
        help_ = "a spec begins with `peft 1`; nothing else is shown of this file"
        raise PeftcError(Diagnostic("P125", f"{printable_path(path)} is no spec", help=help_))
    return parse_text(decode(data, str(path)), str(path))
