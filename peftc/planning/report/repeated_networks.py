"""Groups repeated networks of a layer that are no sites themselves, such as experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peftc.addressing.path_compression import index_ranges
from peftc.addressing.paths import BRANCHES
from peftc.addressing.sites import Site, Steps


@dataclass(frozen=True, eq=False)
class NetworkGroup:
    """Networks of one name under one site whose sites have the same states and shapes."""

    steps: Steps  # of the first network, in its layer
    numbers: tuple[int, ...]
    sites: tuple[Site, ...]  # of all networks

    @property
    def name(self) -> str:
        """`experts[0..7] × 8`, or `shared`."""
        word = self.steps[-1][0]
        return f"{word}[{index_ranges(self.numbers)}] × {len(self.numbers)}" if self.numbers else word


class RepeatedNetworks:
    """The network groups of a layer. `depth`: the number of steps of the layer's path."""

    def __init__(self, sites: Sequence[Site], depth: int) -> None:
        self._depth = depth
        site_steps = {site.steps[depth:] for site in sites}
        networks: dict[Steps, list[Site]] = {}
        for site in sites:
            parent = site.steps[depth:-1]
            if parent and parent not in site_steps and site.steps[-1][0] not in BRANCHES:
                networks.setdefault(parent, []).append(site)
        groups: dict[object, list[Steps]] = {}
        for steps, inside in networks.items():
            key = (steps[:-1], steps[-1][0], steps[-1][1] is None, *map(_signature, inside))
            groups.setdefault(key, []).append(steps)
        self._new: dict[Steps, NetworkGroup] = {}
        for group in groups.values():
            numbers = tuple(index for steps in group if (index := steps[-1][1]) is not None)
            sites = tuple(site for steps in group for site in networks[steps])
            self._new[group[0]] = NetworkGroup(group[0], numbers, sites)
        self._repeats = {steps for group in groups.values() for steps in group[1:]}

    def repeats(self, site: Site) -> bool:
        """Whether the site is in a network other than the first of its group."""
        return site.steps[self._depth : -1] in self._repeats

    def pop(self, site: Site) -> list[NetworkGroup]:
        """The group that begins with this site; each group once."""
        group = self._new.pop(site.steps[self._depth : -1], None)
        return [group] if group else []


def _signature(site: Site) -> object:
    return site.steps[-1], tuple((name, state.shape) for name, state in site.states.items())
