"""How much of a matrix of cases runs. `make test` runs a part in which every law, recipe, spec and
architecture occurs; `make test-full` sets PEFTC_TESTS=full and runs everything. The rest repeats a
law on an architecture that the law does not depend on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

Case = TypeVar("Case")
Other = TypeVar("Other")
FULL = os.environ.get("PEFTC_TESTS") == "full"


def some(cases: Iterable[Case], every: int) -> list[Case]:
    """Every `every`-th case; all of them in the full run."""
    return list(cases)[:: 1 if FULL else every]


def checkerboard(rows: Sequence[Case], columns: Sequence[Other], every: int = 2) -> list[tuple[Case, Other]]:
    """Pairs of a row and a column, every `every`-th column for a row, shifted by one from row to
    row; all pairs in the full run.
    """
    return [(r, c) for i, r in enumerate(rows) for j, c in enumerate(columns) if FULL or (i + j) % every == 0]
