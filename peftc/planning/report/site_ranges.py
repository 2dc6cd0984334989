"""Ranges of the sites of an edit, for plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from peftc.addressing.renaming import LayerName
from peftc.addressing.site_list import Numbers, Place, show_steps
from peftc.addressing.sites import Site
from peftc.planning.report.plan_sites import LAYER, NUMBER, PlanSiteRange
from peftc.planning.representatives import Representatives


@dataclass(frozen=True)
class Pattern:
    """The path and the module of sites, with marks in the place of the numbers that they have."""

    path: str
    module: str
    has_layer: bool = False
    has_number: bool = False


Members = dict[Pattern, dict[int, set[int]]]  # of each pattern: the numbers in each layer


def ranges_of(representatives: Representatives, sites: Iterable[Site]) -> Iterator[PlanSiteRange]:
    """The ranges of all sites that these stand for, and of the others of their modules."""
    members: Members = {}
    layers = _Layers(representatives)
    for site in sites:
        for use in site.uses:
            if (place := representatives.place(use)) is None:
                members.setdefault(Pattern(use.path, use.module), {}).setdefault(0, set()).add(0)
            else:
                _add(members, layers, use, place)
    for pattern, numbers in members.items():
        yield from _ranges(pattern, numbers)


class _Layers:
    """The layers of a plan, of which several sites ask the same."""

    def __init__(self, representatives: Representatives) -> None:
        self.representatives = representatives
        self._known: dict[int, tuple[LayerName | None, object, int | None]] = {}

    def find(self, block: int) -> tuple[LayerName | None, object, int | None]:
        """A layer, what patterns have of it, and its number if its module has that as its name."""
        if block not in self._known:
            layer = self.representatives.sites.blocks[block].layer
            if layer is None:
                self._known[block] = None, None, None
            else:
                (word, index), parent = layer.steps[-1], layer.module.rpartition(".")[0]
                is_name = index is not None and _has_number(layer, index)
                self._known[block] = layer, (layer.steps[:-1], word, parent), index if is_name else None
        return self._known[block]


def _add(members: Members, layers: _Layers, site: Site, place: Place) -> None:
    representatives = layers.representatives
    sites, alike = representatives.sites, representatives.alike_numbers(place)
    numbers = sites.blocks[place.block].template.items[place.item].numbers
    if numbers is None:
        _add_layers(members, layers, place, site.path, site.module)
    elif _follows_numbers(numbers):
        start = show_steps(site.steps[: numbers.position + 1])
        path = f"{start.removesuffix(f'[{place.number}]')}[{NUMBER}]{site.path[len(start) :]}"
        network = sites.network(place) if numbers.modules else ""
        module = f"{network.rpartition('.')[0]}.{NUMBER}{site.module[len(network) :]}" if network else site.module
        _add_layers(members, layers, place, path, module, alike)
    else:  # networks with names of their own
        for number in alike:
            one = place._replace(number=number)
            other = site if one == place else representatives.site(site, one)
            _add_layers(members, layers, one, other.path, other.module)


def _add_layers(
    members: Members,
    layers: _Layers,
    place: Place,
    path: str,
    module: str,
    numbers: Collection[int] = (),
) -> None:
    """Adds a path and a module in every layer that is like the layer of a place."""
    own, first = layers.find(place.block)[0], numbers or (0,)
    known: dict[object, dict[int, set[int]]] = {}  # by what a pattern has of a layer
    for block in layers.representatives.alike_blocks(place):
        layer, key, index = layers.find(block)
        if index is not None and key in known:
            known[key].setdefault(index, set()).update(first)
            continue
        pattern, index = _in_layer(path, module, own, layer, bool(numbers))
        members.setdefault(pattern, {}).setdefault(index, set()).update(first)
        if pattern.has_layer:
            known[key] = members[pattern]


def _has_number(layer: LayerName, index: int) -> bool:
    """Whether the module of a layer has its number as its name."""
    parent = layer.module.rpartition(".")[0]
    return layer.module == f"{parent}.{index}".lstrip(".") and "{" not in layer.module


def _follows_numbers(numbers: Numbers) -> bool:
    """Whether the modules of networks have their numbers as names."""
    return all(name.rpartition(".")[2] == str(i) for i, name in enumerate(numbers.modules))


def _in_layer(
    path: str, module: str, own: LayerName | None, layer: LayerName | None, has_number: bool
) -> tuple[Pattern, int]:
    """A path and a module in layer `own` as a pattern in another layer, and that layer's number."""
    if own is None or layer is None:
        return Pattern(path, module, has_number=has_number), 0
    is_inside = module == own.module or module.startswith(f"{own.module}.")
    rest, inside = path[len(own.path) :], module[len(own.module) :]
    (word, index), parent = layer.steps[-1], layer.module.rpartition(".")[0]
    if index is None or "{" in layer.module or (is_inside and layer.module != f"{parent}.{index}".lstrip(".")):
        return Pattern(layer.path + rest, layer.module + inside if is_inside else module, has_number=has_number), 0
    path = show_steps((*layer.steps[:-1], (word, None))) + f"[{LAYER}]{rest}"
    return Pattern(path, f"{parent}.{LAYER}{inside}".lstrip(".") if is_inside else module, True, has_number), index


def _ranges(pattern: Pattern, layers: dict[int, set[int]]) -> Iterator[PlanSiteRange]:
    """Layers with the same numbers, one behind the other, are one range for each run of these."""
    runs: list[tuple[list[int], list[list[int]]]] = []
    before, parts = set[int](), list[list[int]]()
    for layer, numbers in sorted(layers.items()):
        if numbers != before:
            before, parts = numbers, _runs(numbers)
        if runs and runs[-1][0][-1] == layer - 1 and runs[-1][1] == parts:
            runs[-1][0][-1] = layer
        else:
            runs.append(([layer, layer], parts))
    for (first, last), parts in runs:
        for start, stop in parts:
            yield _range(pattern, (first, last), (start, stop))


def _range(pattern: Pattern, layers: tuple[int, int], numbers: tuple[int, int]) -> PlanSiteRange:
    path, module = pattern.path, pattern.module
    if pattern.has_layer and layers[0] == layers[1]:
        path, module = (text.replace(LAYER, str(layers[0])) for text in (path, module))
    if pattern.has_number and numbers[0] == numbers[1]:
        path, module = (text.replace(NUMBER, str(numbers[0])) for text in (path, module))
    several = pattern.has_layer and layers[0] < layers[1], pattern.has_number and numbers[0] < numbers[1]
    return PlanSiteRange(
        path=path, module=module, layers=layers if several[0] else None, numbers=numbers if several[1] else None
    )


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
