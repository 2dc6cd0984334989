"""Where the hidden states of a site can be observed on the base: at modules, at attention functions, at residual sums."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.sites import INPUT, OUTPUT, Site, Slice, State
from peftc.planning import ir

Kind = Literal[
    "input", "output", "weight", "sum", "residual", "total", "query", "keys", "values", "pair", "heads", "tokens"
]
ATTENTION: Mapping[str, Kind] = {"q": "query", "k": "keys", "v": "values", "kv": "pair"}
ROLES = frozenset(ATTENTION.values()) | {"heads"}
SUMS: Mapping[str, Kind] = {"h": "sum", "res": "residual"}


@dataclass(frozen=True)
class Location:
    """A value that the base computes, and that a hook or an intercepted operation can read and replace.

    `input`, `output`: the first tensor of a call of `module`. `weight`: a parameter of `module`. `sum`, `residual`: the operands
    of the residual sum behind `module`; `total`: its result. `query`, `keys`, `values`, `pair`: the operands of the attention
    whose queries `module` computes; `heads`: its result. `tokens`: rows before those that the embedding `module` makes.
    Only calls inside of a call of `root` count. `owner`: the path of the sub-layer.
    """

    kind: Kind
    module: str
    root: str
    owner: str = ""


class Unreachable(Exception):
    """A state that no hook reaches; its text says why."""


@dataclass(frozen=True)
class Locator:
    """Finds the locations of states; `sites`: all sites of the model, by path."""

    sites: Mapping[str, Site]

    def of(self, site: Site, name: str) -> Location:
        """The location of a state. Raises: Unreachable."""
        state = site.states[name]
        if state.weight is not None:
            return Location("weight", state.weight.module, site.root)
        if state.activation is None or state.activation.feature_map:
            raise Unreachable(f"`{name}` is no value of shape (…, features)")
        return self._boundary(site, name, state) or self._inside(site, name)

    def rows(self, site: Site, name: str) -> Slice | None:
        """The features of the value that are the site's; None for all."""
        place = site.states[name].activation
        return place.rows if place is not None and self.of(site, name).kind in ("input", "output") else None

    def _boundary(self, site: Site, name: str, state: State) -> Location | None:
        assert state.activation is not None
        ends: dict[str, Kind] = {INPUT: "input", OUTPUT: "output"}
        if state.activation.node in ends:
            return Location(ends[state.activation.node], site.module, site.root)
        if self.is_module(site) and name in ("x", "h"):
            return self.at(site, "input" if name == "x" else "output")
        if site.steps[-1][0] == "layer" and name in ("x", "h"):
            return Location("input" if name == "x" else "output", site.root, site.root)
        return None

    def _inside(self, site: Site, name: str) -> Location:
        """A state of a sub-layer, or of a part of one that is no module."""
        tail, parent = site.steps[-1][0], self.sites.get(site.path.rpartition(".")[0], site)
        match tail, name:
            case "hidden", "h":
                return Location("input", site.module, site.root)
            case "heads", "h":
                return self.attention(parent, "heads")
            case "add", "h":
                return self.sum(parent, "total")
            case (("hidden" | "heads" | "add"), _):
                return self.of(parent, name)
            case _, ("q" | "k" | "v" | "kv"):
                return self.attention(site, ATTENTION[name])
            case _, ("h" | "res"):
                return self.sum(site, SUMS[name])
            case _:
                return self.read(site, name)

    def read(self, site: Site, name: str) -> Location:
        """What the Linears of a sub-layer read: `x` the first ones, `c` those of keys and values, `z` the last one."""
        roles = {"x": ("q", "gate", "up"), "c": ("k",), "z": ("down",)}.get(name, ())
        for role in roles:
            if (child := self.child(site, role)) is not None:
                return self.at(child, "input")
        if name != "x" or site.module == site.root:
            raise Unreachable(f"no module of `{site.path}` takes its `{name}`")
        return Location("input", site.module, site.root)

    def sum(self, site: Site, kind: Kind) -> Location:
        for role in ("o", "down"):
            if (child := self.child(site, role)) is not None:
                return Location(kind, self.at(child, "output").module, site.root, site.path)
        if site.module == site.root:
            raise Unreachable(f"no module computes the result of `{site.path}`")
        return Location(kind, site.module, site.root, site.path)

    def results(self, root: str) -> list[Location]:
        """The results of all sub-layers of a layer, where a module computes them."""
        found: list[Location] = []
        for site in self.sites.values():
            if site.root == root and "res" in site.states and site.steps[-1][0] != "add":
                with suppress(Unreachable):
                    found.append(self.sum(site, "sum"))
        return found

    def attention(self, site: Site, kind: Kind) -> Location:
        child = self.child(site, "q")
        if child is None:
            raise Unreachable(f"no module computes the queries of `{site.path}`")
        return Location(kind, self.at(child, "output").module, site.root, site.path)

    def child(self, site: Site, role: str) -> Site | None:
        found = self.sites.get(f"{site.path}.{role}")
        return found if found is not None and self.is_module(found) else None

    def is_module(self, site: Site) -> bool:
        """Whether a site is one module with a weight, such as a Linear or a norm."""
        weight = site.states["w"].weight if "w" in site.states else None
        return weight is not None and weight.module == site.module and weight.stacked_slice is None

    def at(self, site: Site, kind: Kind) -> Location:
        if site.calls != 1:
            raise Unreachable(f"its layer calls `{site.module}` {site.calls} times")
        return Location(kind, site.module, site.root)


def states_of(placed: ir.SiteEdit) -> list[str]:
    """The states that an edit reads or writes at a site."""
    roots = [assign.value for assign in placed.assigns] + [term for _, term in placed.lets]
    reads = [part.state for root in roots for part in ir.subterms(root) if isinstance(part, ir.Read)]
    return list(dict.fromkeys([*(assign.state for assign in placed.assigns), *reads]))
