"""Probes: calls put into a copy of the sources, which tell that a fault's place is reached."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.mutants.faults import Fault

NAME = "__peftc_probe__"


def install(reached: set[int]) -> None:
    """Lets probes add their numbers to a set."""
    setattr(builtins, NAME, reached.add)  # which returns None, so that `probe(1) or (value)` is the value


def write(root: Path, faults: Sequence[Fault]) -> None:
    """Puts the probe number i around the expression in which the fault number i is, in the files under `root`. In processes that tests
    start it does nothing.
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
    spans = list(roots(text))
    insertions: list[tuple[int, int, str]] = []
    for number, fault in faults:
        inside = [(stop - start, start, stop) for start, stop in spans if start <= fault.start and fault.end <= stop]
        if not inside:
            continue  # in a default value or a decorator, which importing runs
        _, start, stop = min(inside)
        insertions += [(start, 1, f"({NAME}({number}) or ("), (stop, 0, "))")]
    for at, _, more in sorted(insertions, reverse=True):
        text = text[:at] + more + text[at:]
    return text


def roots(text: str) -> Iterator[tuple[int, int]]:
    """Where the expressions of statements are that are run by a call: what they compute, assign, test, raise or return."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = [line.encode() for line in text.splitlines()]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1][:column].decode())

    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for statement in (s for function in functions for one in function.body for s in ast.walk(one)):
        for name in ("value", "test", "exc", "iter", "context_expr", "guard", "subject"):
            found = getattr(statement, name, None)
            owner = isinstance(statement, ast.stmt | ast.withitem | ast.match_case)
            if owner and isinstance(found, ast.expr) and not isinstance(found, ast.Starred):
                yield at(found.lineno, found.col_offset), at(found.end_lineno or 0, found.end_col_offset or 0)
