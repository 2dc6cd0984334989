"""Sets of entries of base parameters, so that what is changed twice or under two names is counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod

from peftc.addressing.sites import SiteTable, Slice, WeightRef
from peftc.forms.shapes import Shape, Vector, Weight


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a parameter, seen as (out, in); `width` entries a row."""

    parameter: str
    start: int
    stop: int
    width: int = 1


@dataclass(frozen=True)
class EntryChoice:
    """Some of the entries of a region. What has one `choice` has `count` of them in all."""

    choice: tuple[str, ...]
    count: int
    among: RowRange


class Parameters:
    """The base parameters of a model by name; tied ones under one name."""

    def __init__(self, table: SiteTable) -> None:
        self._first = {name: group[0] for group in table.tied for name in group}
        self._sizes = {f"{m.name}.{a}".lstrip("."): shape for m in table.modules for a, shape in m.parameters.items()}

    def canonical(self, ref: WeightRef) -> str:
        name = parameter_name(ref)
        return self._first.get(name, name)

    def numel(self, name: str) -> int:
        return prod(self._sizes[name])

    def regions(self, ref: WeightRef, shape: Shape) -> Iterator[RowRange]:
        """All the entries that a state `w` or `b` of this shape has."""
        assert isinstance(shape, Weight | Vector)
        rows, width = (shape.d_out, shape.d_in) if isinstance(shape, Weight) else (shape.d, 1)
        name = self.canonical(ref)
        first = (
            self.numel(name) // ref.stacked_slice.count // width * ref.stacked_slice.index if ref.stacked_slice else 0
        )
        return self.rows(name, ref.rows or Slice(0, rows), width, first)

    def rows(self, name: str, rows: Slice, width: int = 1, first: int = 0) -> Iterator[RowRange]:
        """Some rows of a parameter, counted from its row `first` on; one region a block."""
        return (RowRange(name, first + start, first + stop, width) for start, stop in rows.blocks())


def parameter_name(ref: WeightRef) -> str:
    """The dotted name of a parameter."""
    return f"{ref.module}.{ref.attribute}".lstrip(".")


def used_ties(table: SiteTable) -> list[list[str]]:
    """The groups of tied parameters without names that nothing reads: of modules that no forward calls, such as a `shared` embedding
    beside those of the stacks, and of modules around the one that reads it, such as a head's `bias` that is its Linear's.
    """
    idle = {module.name for module in table.modules if not module.called}
    return [[name for name in group if not _unread(name, group, idle)] for group in table.tied]


def _unread(name: str, group: Iterable[str], idle: Collection[str]) -> bool:
    module = name.rpartition(".")[0]
    return module in idle or any(other.rpartition(".")[0].startswith(f"{module}.") for other in group)


def numel(found: Iterable[RowRange | EntryChoice]) -> int:
    """Entries in the union of the regions and of what is chosen, where no two choices are of the same entries."""
    found = set(found)
    whole = {one for one in found if isinstance(one, RowRange)}
    counts = {one.choice: one.count for one in found if isinstance(one, EntryChoice)}
    among: dict[tuple[str, ...], set[RowRange]] = defaultdict(set)
    for one in found:
        if isinstance(one, EntryChoice):
            among[one.choice].add(one.among)
    total = _union(whole)
    apart = sum(min(count, _union(whole | among[choice]) - total) for choice, count in counts.items())
    return min(total + apart, _union(whole.union(*among.values())))


def _union(regions: Iterable[RowRange]) -> int:
    spans: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for region in set(regions):
        spans[region.parameter, region.width].append((region.start, region.stop))
    return sum(width * _length(found) for (_, width), found in spans.items())


def _length(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
