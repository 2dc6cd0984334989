"""The files that a command is about."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from difflib import unified_diff
from pathlib import Path

from peftc.diagnostics.suggestions import did_you_mean


class Unusable(Exception):
    """The command cannot do its work: exit code 2."""


def spec_files(paths: Iterable[str]) -> list[str]:
    """Each file once; of a folder, every `*.peft` below it. Raises: Unusable where there is nothing."""
    found: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            below = sorted(str(file) for file in Path(path).rglob("*.peft") if file.is_file())
            if not below:
                raise Unusable(f"there are no .peft files below {path}")
            found += below
        elif path != "-" and not os.path.exists(path):
            raise Unusable(_missing(path))
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def read(path: str) -> str:
    """The text of a spec, `-` for standard input.

    Raises: PeftcError P024 where it is not text; Unusable where it cannot be read.
    """
    from peftc.semantics.load import decoded, read_text

    try:
        return decoded(sys.stdin.buffer.read(), "<stdin>") if path == "-" else read_text(path)
    except FileNotFoundError:
        raise Unusable(_missing(path)) from None
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from None


def _missing(path: str) -> str:
    folder = Path(path).parent
    there = [str(found) for found in folder.glob("*.peft")] if folder.is_dir() else []
    near = did_you_mean(path, there)
    return f"there is no file {path}" + (f"; {near}" if near else "")


def write(path: str, text: str) -> None:
    """Replaces a file whole, or leaves it as it is. Raises: Unusable where it cannot be written."""
    target = Path(path).resolve()
    try:
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(file.name, target.stat().st_mode)
        os.replace(file.name, target)
    except OSError as error:
        raise Unusable(f"cannot write {path}: {error.strerror}") from None


def difference(before: str, after: str, path: str) -> str:
    """What formatting changes, as a unified diff."""
    lines = unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), path, f"{path} (formatted)")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
