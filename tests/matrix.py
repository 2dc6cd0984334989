"""How much of a matrix of cases is run.

`make test` runs a part in which every law, recipe, spec and architecture occurs; `make test-full`
sets PEFTC_TESTS=full and runs all of it. What is left out repeats a law on an architecture that
differs in nothing the law speaks of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Other = TypeVar("Other")
FULL = os.environ.get("PEFTC_TESTS") == "full"


def some(cases: Iterable[Case], every: int) -> list[Case]:
    """Each case whose number divides by `every`; all in the full run."""
    return list(cases)[:: 1 if FULL else every]


def checkerboard(rows: Sequence[Case], columns: Sequence[Other], every: int = 2) -> list[tuple[Case, Other]]:
    """Pairs of a row and a column: each row meets each `every`-th column, rows in turn; all pairs
    in the full run.
    """
    return [(r, c) for i, r in enumerate(rows) for j, c in enumerate(columns) if FULL or (i + j) % every == 0]
