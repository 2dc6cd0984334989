"""Finds and reads the spec files that a command names."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError, Source
from peftc.diagnostics.suggestions import nearest
from peftc.semantics.files import MAX_BYTES, decode, read_text
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


class Unusable(Exception):
    """The command cannot do its work: exit code 2."""


def find_specs(paths: Iterable[str], keep: Callable[[str], bool] | None = None) -> tuple[list[str], list[Diagnostic]]:
    """Each file once, and what is wrong with paths; of a folder, every `*.peft` below it.

    Args: `keep`: which files of folders to take; files that are named are taken in any case.
    """
    files: list[str] = []
    errors: list[Diagnostic] = []
    for path in paths:
        if os.path.isdir(path):
            below = _specs_below(path)
            if not below:
                errors.append(_unreadable(path, f"there are no .peft files below {path}"))
            files += filter(keep, below)
        elif path != "-" and not os.path.exists(path):
            errors.append(_missing(path))
        else:
            files.append(path)
    return list(dict.fromkeys(files)), errors


def _specs_below(folder: str) -> list[str]:
    # A symbolic link out of the folder leads to a file that the user did not name.
    specs = (file for file in Path(folder).rglob("*.peft") if file.is_file())
    root = Path(folder).resolve()
    return sorted(str(file) for file in specs if file.resolve().is_relative_to(root))


def spec_files(paths: Iterable[str]) -> list[str]:
    """The files of `find_specs`. Raises: Unusable for the first path that is wrong."""
    files, errors = find_specs(paths)
    if errors:
        raise _unusable(errors[0])
    return files


def read(path: str) -> str:
    """The text of a spec, `-` for standard input. Raises: P024, P026, P027; Unusable."""
    try:
        return try_read(path)
    except PeftcError as error:
        if error.diagnostics[0].code == "P112":
            raise _unusable(error.diagnostics[0]) from None
        raise


def try_read(path: str) -> str:
    """The text of a spec, `-` for standard input. Raises: P024, P026, P027, P112."""
    try:
        return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>") if path == "-" else read_text(path)
    except FileNotFoundError:
        raise PeftcError(_missing(path)) from None
    except OSError as error:
        raise PeftcError(_unreadable(path, f"cannot read {path}: {error.strerror}")) from None


def parse_file(path: str) -> ast.Spec:
    """Raises: as `read`; P0xx."""
    return parse_text(read(path), display_path(path))


def display_path(path: str) -> str:
    return "<stdin>" if path == "-" else path


def _missing(path: str) -> Diagnostic:
    folder = Path(path).parent
    names = [file.name for file in folder.glob("*.peft")] if os.path.isdir(folder) else []
    similar = nearest(Path(path).name, names)
    help_ = f"did you mean `{folder / similar}`?" if similar else None
    return _unreadable(path, f"there is no file {path}", help_)


def _unreadable(path: str, message: str, help_: str | None = None) -> Diagnostic:
    return Diagnostic("P112", message, source=Source(path, ""), help=help_)


def _unusable(error: Diagnostic) -> Unusable:
    return Unusable(error.message + (f"; {error.help}" if error.help else ""))
