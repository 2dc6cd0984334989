"""Finds and reads the spec files that a command names."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from peftc.diagnostics.suggestions import nearest
from peftc.semantics.files import MAX_BYTES, decode, read_text
from peftc.syntax import ast
from peftc.syntax.parser import parse_text


class Unusable(Exception):
    """The command cannot do its work: exit code 2."""


def spec_files(paths: Iterable[str]) -> list[str]:
    """Each file once; of a folder, every `*.peft` below it. Raises: Unusable if there is none."""
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            # A symbolic link out of the folder leads to a file that the user did not name.
            specs = (file for file in Path(path).rglob("*.peft") if file.is_file())
            below = sorted(str(file) for file in specs if file.resolve().is_relative_to(Path(path).resolve()))
            if not below:
                raise Unusable(f"there are no .peft files below {path}")
            files += below
        elif path != "-" and not os.path.exists(path):
            raise Unusable(_missing(path))
        else:
            files.append(path)
    return list(dict.fromkeys(files))


def read(path: str) -> str:
    """The text of a spec, `-` for standard input. Raises: P024, P026, P027; Unusable."""
    try:
        return decode(sys.stdin.buffer.read(MAX_BYTES + 1), "<stdin>") if path == "-" else read_text(path)
    except FileNotFoundError:
        raise Unusable(_missing(path)) from None
    except OSError as error:
        raise Unusable(f"cannot read {path}: {error.strerror}") from None


def parse_file(path: str) -> ast.Spec:
    """Raises: as `read`; P0xx."""
    return parse_text(read(path), display_path(path))


def display_path(path: str) -> str:
    return "<stdin>" if path == "-" else path


def _missing(path: str) -> str:
    folder = Path(path).parent
    names = [file.name for file in folder.glob("*.peft")] if os.path.isdir(folder) else []
    similar = nearest(Path(path).name, names)
    return f"there is no file {path}" + (f"; did you mean `{folder / similar}`?" if similar else "")
