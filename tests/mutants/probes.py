"""Probes: calls inserted into a copy of the sources that record when a fault's place is
executed.
"""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.faults import Fault

NAME = "__peftc_probe__"


def install(reached: set[int]) -> None:
    """Directs probes to a set of numbers."""
    setattr(builtins, NAME, reached.add)  # which returns None, so that `probe(1) or (value)` is the value


def write(root: Path, faults: Sequence[Fault]) -> None:
    """Wraps the expression of fault number i in probe number i, in the files under `root`. Child
    processes of tests record nothing.
    """
    by_path: Mapping[str, list[int]] = defaultdict(list)
    for number, fault in enumerate(faults):
        by_path[fault.path].append(number)
    for name, numbers in by_path.items():
        path = root / name
        path.write_text(probed(path.read_text(encoding="utf-8"), [(n, faults[n]) for n in numbers]), encoding="utf-8")
    package = root / "peftc" / "__init__.py"
    first, future, rest = package.read_text(encoding="utf-8").partition("from __future__ import annotations\n")
    idle = f"import builtins\n\nvars(builtins).setdefault({NAME!r}, lambda number: None)\n"
    package.write_text(f"{first}{future}{idle}{rest}", encoding="utf-8")


def probed(text: str, faults: Iterable[tuple[int, Fault]]) -> str:
    """The text with a probe for each fault: around the innermost expression that contains it; else
    (a class attribute, a decorator) as the first statement in the functions of the innermost class
    or function that contains it, or of the file.
    """
    starts = Starts(text)
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    places = [place for function in functions for place in starts.places(function)]
    insertions: list[tuple[int, int, str]] = []
    for number, fault in faults:
        inside = [place for place in places if place.start <= fault.start and fault.end <= place.end]
        if inside:
            place = min(inside, key=lambda place: place.end - place.start)
            insertions += [(place.first, 1, f"({NAME}({number}) or ("), (place.last, 0, "))")]
            continue
        for first in starts.bodies(fault):
            at = starts.at(first.lineno, first.col_offset)
            insertions.append((at, -1, f"{NAME}({number})\n" + " " * first.col_offset))
    for at, _, more in sorted(insertions, reverse=True):
        text = text[:at] + more + text[at:]
    return text


@dataclass(frozen=True)
class Place:
    """Characters `start` to `end`, and the expression `first` to `last` inside that a probe can
    wrap.
    """

    start: int
    end: int
    first: int
    last: int


class Starts:
    """The offsets of the nodes of a text."""

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.lines = [line.encode() for line in text.splitlines()]
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + len(self.lines[line - 1][:column].decode())

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        decorators = getattr(node, "decorator_list", [])
        first = min([node, *decorators], key=lambda n: n.lineno)
        return self.at(first.lineno, first.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def places(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Place]:
        """The expressions that a function computes, assigns, tests, raises or returns."""
        for statement in (s for one in function.body for s in ast.walk(one)):
            for name in ("value", "test", "exc", "iter", "context_expr", "guard", "subject"):
                part = getattr(statement, name, None)
                owner = isinstance(statement, ast.stmt | ast.withitem | ast.match_case)
                if owner and isinstance(part, ast.expr) and not isinstance(part, ast.Starred):
                    whole = statement if isinstance(statement, ast.Raise | ast.Expr) else part
                    yield Place(*self.span(whole), *self.span(part))

    def bodies(self, fault: Fault) -> list[ast.stmt]:
        """The first statements of the innermost class or function that contains a fault, or of
        every one.
        """
        scopes = [
            n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        around = [n for n in scopes if self.span(n)[0] <= fault.start and fault.end <= self.span(n)[1]]
        for scope in sorted(around, key=lambda n: self.span(n)[1] - self.span(n)[0]):
            if bodies := first_statements(scope):
                return bodies
        return first_statements(self.tree)


def first_statements(scope: ast.AST) -> list[ast.stmt]:
    """Of a function, or of each function in a class or file: the first statement that starts a line
    and is no docstring.
    """
    functions = [n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if functions and functions[0] is scope:
        functions = functions[:1]
    bodies = [f.body[1:] if ast.get_docstring(f) is not None else f.body for f in functions]
    return [body[0] for f, body in zip(functions, bodies, strict=True) if body and body[0].lineno > f.lineno]
