"""Sets of entries of base parameters: an entry counts once, however many edits change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from peftc.addressing.sites import SiteTable, Slice, WeightRef
from peftc.forms.shapes import Shape, Vector, Weight


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a parameter, seen as (out, in)."""

    parameter: str
    start: int
    stop: int
    width: int = 1  # entries in a row


@dataclass(frozen=True)
class EntryChoice:
    """Entries that a method selects at run time within some rows."""

    key: tuple[str, ...]
    count: int  # of entries that all choices with this key select together
    rows: RowRange


class Parameters:
    """The base parameters of a model; tied ones have one canonical name."""

    def __init__(self, table: SiteTable) -> None:
        self._canonical = {name: group[0] for group in table.tied for name in group}
        self._sizes = {f"{m.name}.{a}".lstrip("."): shape for m in table.modules for a, shape in m.parameters.items()}

    def canonical(self, ref: WeightRef) -> str:
        name = parameter_name(ref)
        return self._canonical.get(name, name)

    def numel(self, name: str) -> int:
        return prod(self._sizes[name])

    def row_ranges(self, ref: WeightRef, shape: Shape) -> Iterator[RowRange]:
        """The rows of a state `w` or `b` of this shape."""
        assert isinstance(shape, Weight | Vector)
        rows, width = (shape.d_out, shape.d_in) if isinstance(shape, Weight) else (shape.d, 1)
        name, stacked, offset = self.canonical(ref), ref.stacked_slice, 0
        if stacked is not None:
            offset = self.numel(name) // stacked.count // width * stacked.index
        for start, stop in (ref.rows or Slice(0, rows)).blocks():
            yield RowRange(name, offset + start, offset + stop, width)


def parameter_name(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")


def used_ties(table: SiteTable) -> list[list[str]]:
    """The groups of tied parameters, without names through which no forward reads the parameter.

    Such names belong to modules that no forward calls (a `shared` embedding next to those of the
    stacks), and to modules around the called one (a head whose `bias` is that of its Linear).
    """
    uncalled = {module.name for module in table.modules if not module.called}

    def is_read(name: str, group: Iterable[str]) -> bool:
        module = name.rpartition(".")[0]
        return module not in uncalled and not any(o.rpartition(".")[0].startswith(f"{module}.") for o in group)

    return [[name for name in group if is_read(name, group)] for group in table.tied]


def numel(entries: Iterable[RowRange | EntryChoice]) -> int:
    """The number of entries in the union. Choices with different keys are taken to be disjoint."""
    whole: set[RowRange] = set()
    counts: dict[tuple[str, ...], int] = {}
    candidates: dict[tuple[str, ...], set[RowRange]] = defaultdict(set)
    for item in entries:
        if isinstance(item, RowRange):
            whole.add(item)
        else:
            counts[item.key] = item.count
            candidates[item.key].add(item.rows)
    total = _union(whole)
    selected = sum(min(count, _union(whole | candidates[key]) - total) for key, count in counts.items())
    return min(total + selected, _union(whole.union(*candidates.values())))


def _union(ranges: Iterable[RowRange]) -> int:
    total, ends = 0, defaultdict[tuple[str, int], int](int)  # where the rows end that are counted
    for rows in sorted(ranges, key=lambda rows: rows.start):
        key = (rows.parameter, rows.width)
        total += rows.width * max(0, rows.stop - max(rows.start, ends[key]))
        ends[key] = max(ends[key], rows.stop)
    return total
