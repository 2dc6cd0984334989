"""Real text that comes with Python: the docstrings of its standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(module: str, at_least: int = 40) -> list[tuple[str, str]]:
    """(name, docstring) of the definitions in a module or package, read from its source; distinct
    docstrings of `at_least` characters.
    """
    docstrings: dict[str, str] = {}
    for path in _sources(module):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, _DOCUMENTED) and len(text := ast.get_docstring(node) or "") >= at_least:
                docstrings[" ".join(text.split())] = module if isinstance(node, ast.Module) else node.name
    return [(name, text) for text, name in docstrings.items()]


def docstrings(module: str) -> list[str]:
    """The docstrings only."""
    return [text for _, text in documented(module)]


def _sources(module: str) -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    if (single := library / f"{module}.py").is_file():
        yield single
    yield from sorted(p for p in (library / module).rglob("*.py") if "test" not in p.parts)
