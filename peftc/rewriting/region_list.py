"""The regions of a model, once for layers that are alike; a `Region` is made when someone asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from peftc.addressing.lazy_sequence import LazySequence
from peftc.addressing.renaming import LayerName, Renaming
from peftc.planning.ir import at_sites
from peftc.rewriting.edits import Region


@dataclass(frozen=True)
class RegionTemplate:
    """Regions in one layer, or outside of layers. `group`: the number of that of their edits, if
    these are grouped by layers that are alike.
    """

    regions: tuple[Region, ...]
    group: int | None = None
    layer: LayerName | None = None


@dataclass(frozen=True)
class RegionBlock:
    """The regions of a template, in a layer that is like the template's."""

    template: RegionTemplate
    layer: LayerName | None = None

    @cached_property
    def renaming(self) -> Renaming | None:
        """None in the layer of the template itself."""
        old, new = self.template.layer, self.layer
        return None if old is None or new is None or old == new else Renaming(old, new)

    def __iter__(self) -> Iterator[Region]:
        return map(self.named, self.template.regions)

    def named(self, region: Region) -> Region:
        """A region of the template in this layer."""
        if (renaming := self.renaming) is None:
            return region
        edits = [at_sites(one)(renaming.site(one.site)) for one in region.site_edits]
        return Region(renaming.module(region.module), region.inline, list(region.edits), edits)


class RegionList(LazySequence[Region]):
    """All regions in order. Iterating makes them."""

    def __init__(self, blocks: Iterable[RegionBlock]) -> None:
        self.blocks = tuple(blocks)

    @classmethod
    def of(cls, regions: Iterable[Region]) -> RegionList:
        return cls((RegionBlock(RegionTemplate(tuple(regions))),))

    def _make(self) -> Iterable[Region]:
        return (region for block in self.blocks for region in block)

    def __len__(self) -> int:
        return sum(len(block.template.regions) for block in self.blocks)
