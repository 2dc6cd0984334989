"""What a selector names: places in a list of sites, and modules that are no sites of the list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from peftc.addressing.site_list import Place, SiteList
from peftc.addressing.sites import Site, Steps

Items = Mapping[tuple[int, int], frozenset[int]]  # (block, item) -> the numbers of its networks


@dataclass(frozen=True)
class Selection:
    """Sites of a list, each once.

    Attributes:
        items: those in the list: (block, item) -> the numbers of networks, {0} where there is one.
        others: modules without a role, by path.
    """

    sites: SiteList
    items: Items
    others: Mapping[str, Site]

    @classmethod
    def of(cls, sites: SiteList, places: Iterable[Place | Site]) -> Selection:
        """Those at some places, and some that are not in the list."""
        items: dict[tuple[int, int], set[int]] = {}
        others: dict[str, Site] = {}
        for place in places:
            if isinstance(place, Site):
                others[place.path] = place
            else:
                items.setdefault(place[:2], set()).add(place.number)
        return cls(sites, {key: frozenset(numbers) for key, numbers in items.items()}, others)

    def __len__(self) -> int:
        return sum(map(len, self.items.values())) + len(self.others)

    def __or__(self, other: Selection) -> Selection:
        common = {key: self.items[key] | other.items[key] for key in self.items.keys() & other.items}
        items = {**self.items, **other.items, **common}
        return Selection(self.sites, items, {**self.others, **other.others})

    def __sub__(self, other: Selection) -> Selection:
        items = {key: numbers - other.items.get(key, frozenset()) for key, numbers in self.items.items()}
        others = {path: site for path, site in self.others.items() if path not in other.others}
        return Selection(self.sites, {key: numbers for key, numbers in items.items() if numbers}, others)

    def places(self) -> Iterator[Place]:
        """Those in the list, in its order."""
        blocks: dict[int, dict[int, frozenset[int]]] = {}
        for (block, item), numbers in self.items.items():
            blocks.setdefault(block, {})[item] = numbers
        for block, items in sorted(blocks.items()):
            template = self.sites.blocks[block].template
            for group in template.groups:
                members = [item for item in group if item in items]
                for number in template.items[group[0]].all_numbers if members else ():
                    yield from (Place(block, item, number) for item in members if number in items[item])

    def layers(self) -> set[Steps]:
        """The steps of the layers that it has sites in."""
        layers: set[Steps] = set()
        for block, item in self.items:
            layer, site = self.sites.blocks[block].layer, self.sites.blocks[block].template.items[item].site
            steps = site.steps if layer is None else layer.steps
            layers |= {steps[: i + 1] for i, (name, _) in enumerate(steps) if name == "layer"}
        return layers

    @property
    def paths(self) -> list[str]:
        return [*(self.sites.at(place).path for place in self.places()), *self.others]
