"""The files that a command is about."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from difflib import unified_diff
from pathlib import Path

from peftc.diagnostics.suggestions import nearest
from peftc.filesystem.atomic import replace_text


class Unusable(Exception):
    """The command cannot do its work: exit code 2."""


def spec_files(paths: Iterable[str]) -> list[str]:
    """Each file once; of a folder, every `*.peft` in it and below. Raises: Unusable where there is nothing."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            below = sorted(str(file) for file in Path(path).rglob("*.peft") if _is_within(file, path))
            if not below:
                raise Unusable(f"there are no .peft files below {path}")
            found += below
        elif path != "-" and not os.path.exists(path):
            raise Unusable(_missing(path))
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def _is_within(file: Path, folder: str) -> bool:
    """A regular file in a folder, not a symbolic link to one elsewhere: nobody has named that one."""
    return file.is_file() and Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))


def read(path: str) -> str:
    """The text of a spec, `-` for standard input.

    Raises: PeftcError P024 where it is not text, P026 (no regular file), P027 (too large); Unusable where it cannot be read.
    """
    from peftc.semantics.load import MAX_BYTES, decode, read_text

    try:
        return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>") if path == "-" else read_text(path)
    except FileNotFoundError:
        raise Unusable(_missing(path)) from None
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from None


def _missing(path: str) -> str:
    folder = Path(path).parent
    names = [file.name for file in folder.glob("*.peft")] if os.path.isdir(folder) else []
    near = nearest(Path(path).name, names)
    return f"there is no file {path}" + (f"; did you mean `{folder / near}`?" if near else "")


def write(path: str, text: str) -> None:
    """Replaces a file whole, or leaves it as it is. Raises: Unusable where it cannot be written."""
    try:
        replace_text(Path(path).resolve(), text)
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}") from None


def difference(before: str, after: str, path: str) -> str:
    """What formatting changes, as a unified diff."""
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, f"{path} (formatted)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
