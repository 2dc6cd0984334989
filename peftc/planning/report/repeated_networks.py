"""Networks in a layer that are no sites themselves, such as experts: alike ones are shown once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peftc.addressing.path_compression import index_ranges
from peftc.addressing.paths import Steps
from peftc.addressing.sites import Site


@dataclass(frozen=True, eq=False)
class Family:
    """Networks of one name under one site that are alike: `steps` are those of the first, in its layer; `sites` of all."""

    steps: Steps
    numbers: tuple[int, ...]
    sites: tuple[Site, ...]

    @property
    def name(self) -> str:
        """`experts[0..7] × 8`, or `shared`."""
        word = self.steps[-1][0]
        return f"{word}[{index_ranges(self.numbers)}] × {len(self.numbers)}" if self.numbers else word


class Families:
    """The families of a layer's sites, in their order. `depth`: how many steps the layer's own path has."""

    def __init__(self, sites: Sequence[Site], depth: int) -> None:
        self._depth = depth
        own = {site.steps[depth:] for site in sites}
        members: dict[Steps, list[Site]] = {}
        for site in sites:
            above = site.steps[depth:-1]
            if above and above not in own and site.steps[-1][0] not in ("self", "cross"):
                members.setdefault(above, []).append(site)
        alike: dict[object, list[Steps]] = {}
        for steps, inside in members.items():
            key = (steps[:-1], steps[-1][0], steps[-1][1] is None, *map(_signature, inside))
            alike.setdefault(key, []).append(steps)
        self._shown: set[Steps] = set()
        self._first = {steps[0]: _family(steps, members) for steps in alike.values()}
        self._others = {other for steps in alike.values() for other in steps[1:]}

    def repeats(self, site: Site) -> bool:
        """Whether another network is shown in the place of the one that the site is in."""
        return site.steps[self._depth : -1] in self._others

    def new(self, site: Site) -> Iterable[Family]:
        """The family that begins with this site, if one does."""
        steps = site.steps[self._depth : -1]
        if steps in self._first and steps not in self._shown:
            self._shown.add(steps)
            yield self._first[steps]


def _family(steps: Sequence[Steps], members: dict[Steps, list[Site]]) -> Family:
    numbers = tuple(index for one in steps if (index := one[-1][1]) is not None)
    return Family(steps[0], numbers, tuple(site for one in steps for site in members[one]))


def _signature(site: Site) -> object:
    return site.steps[-1], tuple((name, state.shape) for name, state in site.states.items())
