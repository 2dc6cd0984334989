"""Locates the states of a site on the base: modules, attention functions, residual sums."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.sites import INPUT, OUTPUT, TABLE_IDS, Site, Slice
from peftc.planning import ir

EditKey = tuple[str, str]  # the name of an edit, the path of a site
Kind = Literal["input", "output", "weight", "sum", "residual", "total", "query", "keys", "values", "pair", "heads"]
ATTENTION: Mapping[str, Kind] = {"q": "query", "k": "keys", "v": "values", "kv": "pair"}
ATTENTION_KINDS = frozenset(ATTENTION.values()) | {"heads"}
SUMS: Mapping[str, Kind] = {"h": "sum", "res": "residual"}
ENDS: Mapping[str, Kind] = {"x": "input", "h": "output"}
LINEARS = {"x": ("q", "gate", "up"), "c": ("k",), "z": ("down",)}  # the Linears whose input is the state


@dataclass(frozen=True)
class Location:
    """A value of the base that a hook or an intercepted operation can read and replace.

    - `input`, `output`: the first tensor of a call of `module`.
    - `weight`: a parameter of `module`.
    - `sum`, `residual`: the operands of the residual sum after `module`; `total`: its result.
    - `query`, `keys`, `values`, `pair`: the operands of the attention whose queries `module`
      computes; `heads`: its result.

    Only calls inside a call of the layer `root` count. `owner` is the path of the sub-layer.
    """

    kind: Kind
    module: str
    root: str
    owner: str = ""


class ReferenceUnavailable(Exception):
    """The reference model cannot compute a value. The message goes into the report."""


@dataclass(frozen=True)
class Locator:
    """Finds the locations of states. `sites`: all sites of the model, by path."""

    sites: Mapping[str, Site]

    def location(self, site: Site, name: str) -> Location:
        state = site.states[name]
        if state.weight is not None:
            return Location("weight", state.weight.module, site.root)
        if site.bare:
            raise ReferenceUnavailable(f"no module computes `{name}` of `{site.path}`")
        if state.activation is None or state.activation.feature_map:
            raise ReferenceUnavailable(f"`{name}` is not a value of shape (…, features)")
        if state.activation.node == TABLE_IDS:
            raise ReferenceUnavailable(f"`{name}` is computed in the code of `{site.module}`")
        boundaries: dict[str, Kind] = {INPUT: "input", OUTPUT: "output"}
        if state.activation.node in boundaries:
            return Location(boundaries[state.activation.node], site.module, site.root)
        if name in ENDS and self.is_module(site):
            return self.at_module(site, ENDS[name])
        if name in ENDS and site.parts:
            return self.end_of_body(site, name)
        if name in ENDS and site.steps[-1][0] == "layer":
            return Location(ENDS[name], site.root, site.root)
        return self._sub_layer_location(site, name)

    def end_of_body(self, site: Site, name: str) -> Location:
        """The result of a layer that is a loop's body: its last sum, or a norm's result."""
        below = [other for other in self.sites.values() if other.path.startswith(f"{site.path}.")]
        ends = [other for other in below if name == "h" and other.states.get("h") == site.states["h"]]
        sums = [other for other in ends if other.steps[-1][0] == "add"]
        if not ends:
            raise ReferenceUnavailable(f"`{name}` of `{site.path}` is not the result of a module or a sum")
        return self.location((sums or ends)[-1], name)

    def rows(self, site: Site, name: str) -> Slice | None:
        """The features of the value that belong to the site; None for all."""
        place = site.states[name].activation
        return place.rows if place is not None and self.location(site, name).kind in ("input", "output") else None

    def _sub_layer_location(self, site: Site, name: str) -> Location:
        tail, parent = site.steps[-1][0], self.sites.get(site.path.rpartition(".")[0], site)
        match tail, name:
            case "hidden", "h":
                if self._child(parent, "down") is None:
                    raise ReferenceUnavailable(f"no module reads `h` of `{site.path}`")
                return Location("input", site.module, site.root)
            case "heads", "h":
                return self.attention(parent, "heads")
            case "add", "h":
                return self.residual_sum(parent, "total")
            case (("hidden" | "heads" | "add"), _):
                return self.location(parent, name)
            case _, ("q" | "k" | "v" | "kv"):
                return self.attention(site, ATTENTION[name])
            case _, ("h" | "res"):
                return self.residual_sum(site, SUMS[name])
            case _:
                if (child := self._child(site, *LINEARS.get(name, ()))) is not None:
                    return self.at_module(child, "input")
                if name != "x" or site.module == site.root:
                    raise ReferenceUnavailable(f"`{name}` of `{site.path}` is not the input of a module")
                return Location("input", site.module, site.root)

    def residual_sum(self, site: Site, kind: Kind) -> Location:
        child = self._child(site, "o", "down")
        if child is None and site.module == site.root:
            raise ReferenceUnavailable(f"no module computes the result of `{site.path}`")
        module = site.module if child is None else self.at_module(child, "output").module
        return Location(kind, module, site.root, site.path)

    def sub_layer_results(self, root: str) -> list[Location]:
        """The results of the sub-layers of a layer, where a module computes them."""
        locations: list[Location] = []
        for site in self.sites.values():
            if site.root == root and "res" in site.states and site.steps[-1][0] != "add":
                with suppress(ReferenceUnavailable):
                    locations.append(self.residual_sum(site, "sum"))
        return locations

    def attention(self, site: Site, kind: Kind) -> Location:
        child = self._child(site, "q")
        if child is None:
            raise ReferenceUnavailable(f"no module computes the queries of `{site.path}`")
        return Location(kind, self.at_module(child, "output").module, site.root, site.path)

    def _child(self, site: Site, *roles: str) -> Site | None:
        """The first of these Linears of a sub-layer that is a module."""
        children = (self.sites.get(f"{site.path}.{role}") for role in roles)
        return next((child for child in children if child is not None and self.is_module(child)), None)

    def is_module(self, site: Site) -> bool:
        weight = site.states["w"].weight if "w" in site.states else None
        own = weight is not None and weight.module == site.module and weight.stacked_slice is None
        return own and not site.bare

    def at_module(self, site: Site, kind: Kind) -> Location:
        if site.calls != 1:
            raise ReferenceUnavailable(f"its layer calls `{site.module}` {site.calls} times")
        return Location(kind, site.module, site.root)


def key_of(site_edit: ir.SiteEdit) -> EditKey:
    return site_edit.edit, site_edit.site.path


def states_of(site_edit: ir.SiteEdit) -> list[str]:
    roots = [assign.value for assign in site_edit.assigns] + [term for _, term in site_edit.lets]
    reads = [part.state for root in roots for part in ir.subterms(root) if isinstance(part, ir.Read)]
    return list(dict.fromkeys([*(assign.state for assign in site_edit.assigns), *reads]))
