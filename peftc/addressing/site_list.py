"""The sites of a model, once for each kind of layer; a `Site` is made when someone asks for it.

A model is blocks of sites: its layers, and what is before, between and behind them. The layers of
one kind have one `Template`, the sites of the first of them. Networks that a router chooses among
are in it once, as the sites of number 0 and how many numbers there are.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple, overload

from peftc.addressing.renaming import LayerName, Renaming
from peftc.addressing.sites import Site, SiteTable, Steps

_LIST = "_site_list"  # where a table of plain sites keeps them
_LAYER = re.compile(r"\blayer\[\d+\]")


@dataclass(frozen=True)
class Numbers:
    """The numbers of equal networks, such as experts: from 0 to `count` - 1.

    Attributes:
        position: of the step that has the number, in the paths of their sites.
        modules: of each network in the first layer; () where networks are slices of parameters.
    """

    count: int
    position: int
    modules: tuple[str, ...] = ()

    def site(self, site: Site, number: int) -> Site:
        """The site of a network, from that of network 0."""
        if number == 0:
            return site
        name, _ = site.steps[self.position]
        steps = (*site.steps[: self.position], (name, number), *site.steps[self.position + 1 :])
        old, new = (show_steps(path[: self.position + 1]) for path in (site.steps, steps))
        if self.modules:
            names = LayerName(site.steps, old, self.modules[0]), LayerName(steps, new, self.modules[number])
            return replace(Renaming(*names).site(site), steps=steps, runs=site.runs)
        states = {
            key: replace(state, weight=replace(ref, stacked_slice=replace(ref.stacked_slice, index=number)))
            if (ref := state.weight) is not None and ref.stacked_slice is not None
            else state
            for key, state in site.states.items()
        }
        return replace(site, steps=steps, path=new + site.path[len(old) :], states=states)


@dataclass(frozen=True)
class TemplateSite:
    """A site of the first layer of its kind. `numbers`: if it is that of network 0 of several."""

    site: Site
    numbers: Numbers | None = None

    @property
    def all_numbers(self) -> range:
        return range(1 if self.numbers is None else self.numbers.count)

    def module(self, number: int) -> str | None:
        """The module of a network's site; None if it is a slice of a parameter."""
        if self.numbers is None:
            return self.site.module
        modules = self.numbers.modules
        return modules[number] + self.site.module[len(modules[0]) :] if modules else None


@dataclass(frozen=True)
class Template:
    """What layers of one kind have. Without `layer`, sites outside of layers."""

    layer: LayerName | None
    items: tuple[TemplateSite, ...]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Items in order; those of one list of networks are together, which go number by number."""

        def group_of(i: int) -> object:
            return i if self.items[i].numbers is None else ("numbers", id(self.items[i].numbers))

        return tuple(tuple(group) for _, group in groupby(range(len(self.items)), group_of))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """How many sites are before each group, and in all."""
        sizes = (len(group) * len(self.items[group[0]].all_numbers) for group in self.groups)
        return (0, *accumulate(sizes))

    @cached_property
    def places(self) -> Mapping[int, tuple[int, int, int]]:
        """Of each item: the number of sites before its group, that of one network's, its index."""
        return {
            i: (start, len(group), place)
            for start, group in zip(self.starts, self.groups, strict=False)
            for place, i in enumerate(group)
        }

    @cached_property
    def by_path(self) -> Mapping[str, tuple[int, int]]:
        """Item and number of each site, by its path in the first layer."""
        return {self.path(i, number): (i, number) for i, item in enumerate(self.items) for number in item.all_numbers}

    def path(self, item: int, number: int) -> str:
        site, numbers = self.items[item].site, self.items[item].numbers
        if numbers is None or number == 0:
            return site.path
        steps = site.steps[: numbers.position + 1]
        old = show_steps(steps)
        return f"{old.removesuffix('[0]')}[{number}]{site.path[len(old) :]}"


class Place(NamedTuple):
    """Where a site is: its block, its item in the block's template, the number of its network."""

    block: int
    item: int
    number: int = 0


@dataclass(frozen=True)
class Block:
    """The sites of one layer, or sites outside of layers."""

    template: Template
    layer: LayerName | None = None

    def __len__(self) -> int:
        return self.template.starts[-1]


def show_steps(steps: Steps) -> str:
    """`(("layer", 3), ("attn", None))` as `layer[3].attn`."""
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def site_list(table: SiteTable) -> SiteList:
    """The sites of a table, by kinds of layers where these are known."""
    if isinstance(table.sites, SiteList):
        return table.sites
    if (sites := vars(table).get(_LIST)) is None:
        sites = vars(table)[_LIST] = SiteList.of(table.sites)
    return sites


class SiteList(Sequence[Site]):
    """The sites in model order. Iterating makes them all; `place` and `find` make one."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = tuple(block for block in blocks if len(block))
        self._starts = (0, *accumulate(map(len, self.blocks)))
        self._sites = dict[Place, Site]()
        self._renamings = dict[int, Renaming | None]()

    @classmethod
    def of(cls, sites: Iterable[Site]) -> SiteList:
        """A list of sites of which nothing else is known."""
        if isinstance(sites, SiteList):
            return sites
        return cls([Block(Template(None, tuple(map(TemplateSite, sites))))])

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Site]:
        return map(self.at, self.places())

    @overload
    def __getitem__(self, index: int) -> Site: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Site, ...]: ...
    def __getitem__(self, index: int | slice) -> Site | tuple[Site, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        position = range(len(self))[index]
        number = bisect_right(self._starts, position) - 1
        template, rest = self.blocks[number].template, position - self._starts[number]
        group = bisect_right(template.starts, rest) - 1
        items = template.groups[group]
        network, item = divmod(rest - template.starts[group], len(items))
        return self.at(Place(number, items[item], network))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SiteList) and other.blocks == self.blocks:
            return True
        return isinstance(other, SiteList | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # sites have none

    def __repr__(self) -> str:
        return repr(tuple(self))

    def places(self) -> Iterator[Place]:
        """The places of all sites, in order."""
        for number, block in enumerate(self.blocks):
            items = block.template.items
            for group in block.template.groups:
                for network in items[group[0]].all_numbers:
                    for item in group:
                        yield Place(number, item, network)

    def order(self, place: Place) -> int:
        """The index of a site."""
        start, size, index = self.blocks[place.block].template.places[place.item]
        return self._starts[place.block] + start + place.number * size + index

    def at(self, place: Place) -> Site:
        """The site at a place: always the same object."""
        if (site := self._sites.get(place)) is None:
            item = self.blocks[place.block].template.items[place.item]
            site = item.site if item.numbers is None else item.numbers.site(item.site, place.number)
            site = self._sites[place] = self.in_layer(site, place.block)
        return site

    def in_layer(self, site: Site, block: int) -> Site:
        """A site of a template, in a layer of its kind."""
        if block not in self._renamings:
            old, new = self.blocks[block].template.layer, self.blocks[block].layer
            self._renamings[block] = None if old is None or new is None or old == new else Renaming(old, new)
        renaming = self._renamings[block]
        return site if renaming is None else renaming.site(site)

    def template_site(self, place: Place) -> Site:
        """The site of the first layer, and the first network, that differs in names alone."""
        return self.blocks[place.block].template.items[place.item].site

    def network(self, place: Place) -> str:
        """The dotted name of the network's module."""
        block = self.blocks[place.block]
        numbers = block.template.items[place.item].numbers
        assert numbers is not None
        name = numbers.modules[place.number]
        return (
            name
            if not block.template.layer or not block.layer
            else Renaming(block.template.layer, block.layer).module(name)
        )

    # Lookup

    @cached_property
    def by_module(self) -> Mapping[str, Sequence[Place]]:
        """The places of each module's sites, in order; but of slices of parameters."""
        places: dict[str, list[Place]] = {}
        for number, block in enumerate(self.blocks):
            renaming = Renaming(block.template.layer, block.layer) if block.template.layer and block.layer else None
            for group in block.template.groups:
                for network in block.template.items[group[0]].all_numbers:
                    for item in group:
                        if (module := block.template.items[item].module(network)) is not None:
                            name = module if renaming is None else renaming.module(module)
                            places.setdefault(name, []).append(Place(number, item, network))
        return places

    @cached_property
    def layers(self) -> Mapping[str, int]:
        """The block of each layer, by the layer's path."""
        return {block.layer.path: i for i, block in enumerate(self.blocks) if block.layer is not None}

    @cached_property
    def templates(self) -> Mapping[int, Sequence[int]]:
        """The blocks of each template, by `id`, in order."""
        blocks: dict[int, list[int]] = {}
        for number, block in enumerate(self.blocks):
            blocks.setdefault(id(block.template), []).append(number)
        return blocks

    def find(self, path: str) -> Place | None:
        """The place of the site of that path."""
        for match in _LAYER.finditer(path):
            if (number := self.layers.get(path[: match.end()])) is not None:
                template = self.blocks[number].template
                assert template.layer is not None
                member = template.by_path.get(template.layer.path + path[match.end() :])
                return None if member is None else Place(number, *member)
        return self._outside.get(path)

    @cached_property
    def _outside(self) -> Mapping[str, Place]:
        """The places outside of layers; of several sites of one path, the last."""
        blocks = ((i, block) for i, block in enumerate(self.blocks) if block.layer is None)
        return {item.site.path: Place(i, j) for i, block in blocks for j, item in enumerate(block.template.items)}

    def get(self, path: str) -> Site | None:
        place = self.find(path)
        return None if place is None else self.at(place)
