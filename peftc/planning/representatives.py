"""Which sites of a spec are alike, so that a plan computes with one of them and counts the others.

Layers are alike if they are of one kind, and every edit selects the same sites in them; networks of
a layer, such as experts, if every edit selects the same sites in them. A layer with a parameter or
a module that is also used elsewhere is like no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from peftc.addressing.lazy_sequence import LazySequence
from peftc.addressing.renaming import LayerName
from peftc.addressing.selection import Selection
from peftc.addressing.site_list import Place, site_list
from peftc.addressing.sites import Site, SiteTable
from peftc.planning.ir import SiteEdit, at_sites
from peftc.planning.selection.module_sites import parameter_site
from peftc.planning.selection.selectors import ordered

Variants = Callable[[LayerName | None], Iterable[object]]


class Representatives:
    """One site for all that are alike. `single`: every site stands for itself alone. `variants`:
    what of the edits differs by layer.
    """

    def __init__(
        self, table: SiteTable, selections: Sequence[Selection], single: bool = False, variants: Variants | None = None
    ) -> None:
        self.table, self.sites, self.single = table, site_list(table), single
        self._variants = variants
        self.modules = {site.module for selection in selections for site in selection.others.values()}
        self.members: dict[int, list[int]] = {}  # blocks, by the first that is like them
        self.networks: dict[tuple[int, int], dict[int, list[int]]] = {}  # by block and item: numbers, by the first
        signatures: dict[object, int] = {}
        choices = [_by_block(selection) for selection in selections]
        for block in sorted({block for choice in choices for block in choice}):
            parts = tuple(tuple(choice.get(block, ())) for choice in choices)
            first = signatures.setdefault(self._signature(block, parts), block)
            self.members.setdefault(first, []).append(block)
            if first == block:
                self._add_networks(block, parts)

    def _signature(self, block: int, parts: object) -> object:
        if self.single or self._is_unique(block):
            return block
        template, layer = self.sites.blocks[block].template, self.sites.blocks[block].layer
        variants = () if self._variants is None else tuple(self._variants(layer))
        return id(template), None if layer is None else layer.runs, parts, variants

    def _add_networks(self, block: int, parts: Sequence[_Part]) -> None:
        """The networks that are alike, of each list of networks in a block."""
        template = self.sites.blocks[block].template
        for group in template.groups:
            alike: dict[object, list[int]] = defaultdict(list)
            chosen = [numbers for part in parts for item, numbers in part if item in group]
            for number in template.items[group[0]].all_numbers if chosen else ():
                is_own = self.single or self._is_unique(block)
                alike[number if is_own else tuple(number in numbers for numbers in chosen)].append(number)
            numbers = {members[0]: members for members in alike.values()}
            self.networks |= {(block, item): numbers for item in group}

    @cached_property
    def _shared_names(self) -> frozenset[str]:
        """Names of modules and parameters with uses elsewhere, of modules that are edited by name,
        and of all modules around them.
        """
        table = self.table
        groups = (table.tied, table.overlaps, table.shared_modules, table.cross_layer_calls, table.external_reads)
        names = self.modules.union(chain.from_iterable(chain.from_iterable(groups)))
        return frozenset(prefix for name in names for prefix in _prefixes(name))

    def _is_unique(self, block: int) -> bool:
        """Whether a block is of sites outside layers, of a body of a loop, or used elsewhere."""
        layer, template = self.sites.blocks[block].layer, self.sites.blocks[block].template
        if layer is None or any(item.site.parts for item in template.items):
            return True
        return layer.module in self._shared_names

    def of(self, selection: Selection) -> list[Site]:
        """The representatives of the sites of a selection, in order."""
        items = {
            key: numbers.intersection(self.networks[key])
            for key, numbers in selection.items.items()
            if key[0] in self.members
        }
        return ordered(Selection(self.sites, items, selection.others), self.table)

    def count(self, site: Site) -> int:
        """How many sites a representative stands for."""
        place = self.place(site)
        return 1 if place is None else len(self.alike_blocks(place)) * len(self.alike_numbers(place))

    def alike_blocks(self, place: Place) -> Sequence[int]:
        """The blocks that are like that of a place; it alone if it is not the first of them."""
        return self.members.get(place.block, (place.block,))

    def alike_numbers(self, place: Place) -> Sequence[int]:
        return self.networks.get(place[:2], {}).get(place.number, (place.number,))

    def place(self, site: Site) -> Place | None:
        """The place of a site, or of the one that has it as a parameter; None for other modules."""
        if (place := self.sites.find(site.path)) is None and len(site.steps) > 1:
            place = self.sites.find(site.path.rpartition(".")[0])
        return place

    def places(self, site: Site) -> Iterator[Place]:
        """The places of all sites that a representative stands for."""
        if (place := self.place(site)) is not None:
            for block in self.alike_blocks(place):
                yield from (Place(block, place.item, number) for number in self.alike_numbers(place))

    def site(self, representative: Site, place: Place) -> Site:
        """The site at a place, of those that a representative stands for."""
        return next(self._sites_at(representative, (place,)))

    def _sites_at(self, representative: Site, places: Iterable[Place]) -> Iterator[Site]:
        is_parameter, name = self.sites.find(representative.path) is None, representative.steps[-1][0]
        sites = map(self.sites.at, places)
        return (parameter_site(site, name) for site in sites) if is_parameter else sites

    def expand(self, site_edits: Sequence[SiteEdit], selection: Selection) -> list[SiteEdit]:
        """An edit at all its sites, in order. `site_edits`: those at representatives."""
        if all(one.count == 1 for one in site_edits):
            return list(site_edits)
        modules = {info.name: i for i, info in enumerate(self.table.modules)} if selection.others else {}

        def position(site: Site) -> tuple[int, int]:
            place = self.place(site)
            return modules.get(site.module, -1), -1 if place is None else self.sites.order(place)

        result: list[tuple[tuple[int, int], SiteEdit]] = []
        for one in site_edits:
            if one.count == 1:
                result.append((min(map(position, one.site.uses)), one))
                continue
            copy, places = at_sites(one), list(self.places(one.site))
            for place, site in zip(places, self._sites_at(one.site, places), strict=True):
                result.append(((modules.get(site.module, -1), self.sites.order(place)), copy(site)))
        return [one for _, one in sorted(result, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class EditGroup:
    """The edits in one block of sites. `layers`: all that are like it, with the same edits; itself
    first. `statements`: of each edit, the number of its statement in the spec.
    """

    site_edits: tuple[SiteEdit, ...]
    statements: tuple[int, ...]
    blocks: tuple[int, ...]
    layers: tuple[LayerName | None, ...]


class SiteEdits(LazySequence[SiteEdit]):
    """Every edit at every site, in the order of the spec; made when someone asks for one.

    `representatives` has one for all sites that are alike.
    """

    def __init__(self, edits: Iterable[tuple[Sequence[SiteEdit], Selection]], of: Representatives) -> None:
        self._edits, self._of = tuple(edits), of
        self.representatives = tuple(one for site_edits, _ in self._edits for one in site_edits)

    @property
    def table(self) -> SiteTable:
        """The sites of the model."""
        return self._of.table

    def _make(self) -> Iterable[SiteEdit]:
        return (one for site_edits, selection in self._edits for one in self._of.expand(site_edits, selection))

    @cached_property
    def groups(self) -> list[EditGroup] | None:
        """The edits once for all blocks that are alike, in the order of the blocks; None where some
        are of modules or of parameters, or of modules with several sites.
        """
        of, sites = self._of, self._of.sites
        edits: dict[int, list[tuple[int, int, SiteEdit]]] = {block: [] for block in of.members}
        for statement, (site_edits, selection) in enumerate(self._edits):
            for one in site_edits:
                place = sites.find(one.site.path)
                if place is None or selection.others or one.site.shared_with or place.block not in edits:
                    return None
                copy = at_sites(one)
                for number in of.alike_numbers(place):
                    own = place._replace(number=number)
                    edits[place.block].append((statement, sites.order(own), copy(sites.at(own))))
        groups: list[EditGroup] = []
        for block, members in of.members.items():
            own = sorted(edits[block], key=lambda one: one[:2])
            layers = tuple(sites.blocks[member].layer for member in members)
            if own:
                statements = tuple(statement for statement, _, _ in own)
                groups.append(EditGroup(tuple(one for _, _, one in own), statements, tuple(members), layers))
        return groups

    def places(self, site: Site) -> list[Place]:
        """The places of all sites that a representative stands for; none for other modules."""
        return list(self._of.places(site))

    def __len__(self) -> int:
        return sum(one.count for one in self.representatives)


_Part = Sequence[tuple[int, frozenset[int]]]  # what a selection has of a block: items, each with numbers


def _by_block(selection: Selection) -> Mapping[int, list[tuple[int, frozenset[int]]]]:
    blocks: dict[int, list[tuple[int, frozenset[int]]]] = defaultdict(list)
    for (block, item), numbers in sorted(selection.items.items(), key=lambda one: one[0]):
        blocks[block].append((item, numbers))
    return blocks


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
