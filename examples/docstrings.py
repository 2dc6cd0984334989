"""Real text that every Python carries: the docstrings of its standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module: str, at_least: int = 40) -> list[str]:
    """The different docstrings of a module or package, read from its source; `at_least` characters each."""
    found: dict[str, None] = {}
    for path in _sources(module):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and len(text := ast.get_docstring(node) or "") >= at_least:
                found[" ".join(text.split())] = None
    return list(found)


def _sources(module: str) -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    if (single := library / f"{module}.py").is_file():
        yield single
    yield from sorted(p for p in (library / module).rglob("*.py") if "test" not in p.parts)
