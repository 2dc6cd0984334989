"""The entries of a model's parameters: rows, and those that a method selects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from peftc.addressing.module_infos import infos_of
from peftc.addressing.sites import SiteTable, Slice, WeightRef, parameter_name
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
        self._modules = infos_of(table)

    def canonical(self, ref: WeightRef) -> str:
        name = parameter_name(ref)
        return self._canonical.get(name, name)

    def numel(self, name: str) -> int:
        module, _, attribute = name.rpartition(".")
        info = self._modules.find(module)
        assert info is not None
        return prod(info.parameters[attribute])

    def row_ranges(self, ref: WeightRef, shape: Shape) -> Iterator[RowRange]:
        """The rows of a state `w` or `b` of this shape."""
        assert isinstance(shape, Weight | Vector)
        rows, width = (shape.d_out, shape.d_in) if isinstance(shape, Weight) else (shape.d, 1)
        name, stacked, offset = self.canonical(ref), ref.stacked_slice, 0
        if stacked is not None:
            offset = self.numel(name) // stacked.count // width * stacked.index
        for start, stop in (ref.rows or Slice(0, rows)).blocks():
            yield RowRange(name, offset + start, offset + stop, width)


def numel(entries: Iterable[RowRange | EntryChoice]) -> int:
    """The number of entries in the union. Choices with different keys are taken to be disjoint."""
    return weighted_numel(dict.fromkeys(entries, 1))


def weighted_numel(entries: Mapping[RowRange | EntryChoice, int]) -> int:
    """The same, where each stands for a number of others in other layers, or networks.

    Entries with different numbers are disjoint.
    """
    weights = sorted(set(entries.values()))
    total, selected, most = (
        (
            sum(weight * size for weight, size in zip(weights, sizes, strict=True))
            for sizes in zip(*(_sizes([one for one, n in entries.items() if n == w]) for w in weights), strict=True)
        )
        if weights
        else (0, 0, 0)
    )
    return min(total + selected, most)


def _sizes(entries: Iterable[RowRange | EntryChoice]) -> tuple[int, int, int]:
    """The entries that are whole rows, those that are selected beside them, and all that may be."""
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
    return total, selected, _union(whole.union(*candidates.values()))


def _union(ranges: Iterable[RowRange]) -> int:
    total, ends = 0, defaultdict[tuple[str, int], int](int)  # where the rows end that are counted
    for rows in sorted(ranges, key=lambda rows: rows.start):
        key = (rows.parameter, rows.width)
        total += rows.width * max(0, rows.stop - max(rows.start, ends[key]))
        ends[key] = max(ends[key], rows.stop)
    return total
