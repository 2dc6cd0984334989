"""Chooses, for each edit, the smallest module that contains every state that it reads or writes."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx

from peftc.addressing.sites import Site, State
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.walk import submodule
from peftc.planning import ir
from peftc.recognition.layer_types import LayerType
from peftc.rewriting.anchors import Anchor, calls_of, contains, frames_between, relative
from peftc.rewriting.edits import STREAM, frozen_modules, used_states, written_states
from peftc.rewriting.legality.bypasses import has_fast_path, own_parameters, parameter_reads, parents
from peftc.rewriting.legality.preconditions import check_gradients
from peftc.rewriting.states import (
    aliases_may_diverge,
    definitions,
    later_versions,
    may_write,
    node_of,
    state_anchors,
    state_of,
    steps_below_layer,
)
from peftc.tracing.bytecode import mutates_conditionally
from peftc.tracing.in_place import leaves
from peftc.tracing.region_trace import ModuleCall


@dataclass(frozen=True)
class Placement:
    """The region of edits, the modules to enter, and anchors, all relative to the layer."""

    region: str
    inline: frozenset[str]
    anchors: dict[str, Anchor]


Placed = tuple[list[ir.SiteEdit], Placement]  # edits that share a region


class LayerPlacements:
    """Where the edits of one layer are placed.

    Args: `memory`: results for layers of one type. `shared`: groups of dotted names of one module.
    `kinds`: the types of layers, by key. Around a loop, `kind` is one of those in the same graph.
    """

    def __init__(
        self,
        kind: LayerType,
        layer: str,
        memory: dict[Any, Any],
        shared: Iterable[tuple[str, ...]] = (),
        kinds: Mapping[str, LayerType] | None = None,
    ) -> None:
        self.kind, self.trace, self.layer, self.memory, self.kinds = kind, kind.traced, layer, memory, kinds or {}
        self.shared = {
            relative(name, layer): group for group in shared for name in group if f"{name}.".startswith(f"{layer}.")
        }

    def kind_of(self, site: Site) -> LayerType:
        return self.kinds.get(site.kind, self.kind)

    def join_readers(self, groups: list[Placed], has_pass: bool) -> list[Placed]:
        """Moves edits of what a module reads into the region of an edit around it that uses the
        value, too: in the code around the module, it is what it was before. A pass may use all.
        """
        while True:
            users: dict[fx.Node, set[str]] = {}
            for group, c in groups:
                used = [
                    node for p in group for name in used_states(p) if name != STREAM for node in self.values_of(p, name)
                ]
                for node in used:
                    users.setdefault(node, {""} if has_pass else set()).add(c.region)
            moves: list[Placed] = []
            for group, c in groups:
                names = {(id(p), name): (p, name) for p in group for name in written_states(p)}.values()
                inputs = [pair for pair in names if pair[1] in c.anchors and c.anchors[pair[1]].kind == "in"]
                around = {r for pair in inputs for node in self.values_of(*pair) for r in users.get(node, ())}
                region = min((r for r in around if contains(r, c.region)), key=len, default=c.region)
                moves.append((group, c if region == c.region else self.placement(group, region)))
            if all(c is before for (_, c), (_, before) in zip(moves, groups, strict=True)):
                return groups
            groups = moves

    def values_of(self, site_edit: ir.SiteEdit, name: str) -> list[fx.Node]:
        """The node of a state, and of the tensor after writes in place; none of a parameter."""
        state = state_of(site_edit.site, name)
        return (
            [] if state.weight is not None else later_versions(node_of(state, self.layer, site_edit.site, self.trace))
        )

    def placement(self, group: list[ir.SiteEdit], region: str | None = None) -> Placement:
        """The smallest region of edits, or `region`. Raises: P401 if they cannot be there."""
        states = {n: state_of(p.site, n) for p in group for n in used_states(p)}
        writes = {n for p in group for n in written_states(p)}
        functions = {relative(m, self.layer) for p in group for m in frozen_modules(p).values()}
        first = group[0]  # all are at one site

        def is_edited(name: str) -> bool:
            return any(contains(name, module) or contains(module, name) for module in first.modules)

        # modules that are shared with places where these edits do not apply
        excluded = {own for own, names in self.shared.items() if not all(map(is_edited, names))}
        # the graph of a loop has several layers, in each of which a module may have such a path
        place = relative(first.site.module, self.layer), steps_below_layer(first.site) or first.site.path
        names = map(tuple, map(sorted, (excluded, states, writes, functions)))
        key = (id(self.kind_of(first.site)), place, region, *names)
        if key not in self.memory:
            candidates = self.candidates() if region is None else [region]
            self.memory[key] = self.find_region(
                first, states, writes, functions, [r for r in candidates if r not in excluded]
            )
        return self.memory[key]

    def find_region(
        self,
        first: ir.SiteEdit,
        states: dict[str, State],
        writes: set[str],
        functions: set[str],
        candidates: Iterable[str],
    ) -> Placement:
        site = first.site
        check_gradients({n: self.nodes_of(states[n], site) for n in sorted(writes)}, self.trace.graph)
        weights = [s.weight for s in states.values() if s.weight is not None]
        readers = [w.stacked_slice.reader for w in weights if w.stacked_slice is not None]
        if readers:  # the code that indexes a stacked parameter is not entered
            return Placement(relative(readers[0], self.layer), frozenset(), {})
        for region in candidates:
            applies = all(contains(region, f) and f != region for f in functions)
            if applies and (placement := self.place_in(region, states, writes, site)) is not None:
                return placement
        message = f"no module of {site.root} contains all the states that `{first.edit}` uses at {site.path}"
        raise PeftcError(Diagnostic("P401", message, notes=(f"states: {', '.join(states)}",)))

    def nodes_of(self, state: State, site: Site) -> list[fx.Node]:
        """The node that computes a state, or the nodes that read a parameter."""
        if state.weight is None:
            return [node_of(state, self.layer, site, self.trace)]
        module = relative(state.weight.module, self.layer)
        names = (module, f"{module}.{state.weight.attribute}")
        return [n for n in self.trace.graph.nodes if n.op in ("call_module", "get_attr") and n.target in names]

    def candidates(self) -> list[str]:
        """The modules that may be regions, innermost first."""
        key = ("candidates", id(self.kind))
        if key not in self.memory:
            root = self.kind.root
            calls = sorted({c.name for c in calls_of(self.trace)}, key=lambda n: (-len(n.split(".")) if n else 0, n))
            weighted = (n for n in calls if next(submodule(root, n).parameters(), None) is not None)
            self.memory[key] = [n for n in weighted if not self.has_external_reads(n)]
        return self.memory[key]

    def names_in_layer(self, state: State, site: Site) -> tuple[list[Anchor], list[Anchor], list[Anchor]]:
        """The anchors of a state, those of them that define it, and the use that must read it."""
        own = (relative(site.module, self.layer), steps_below_layer(site))
        key = ("anchors", id(self.kind_of(site)), own, state)
        if key not in self.memory:
            every = state_anchors(state, self.layer, site, self.trace)
            self.memory[key] = every, *definitions(state, self.layer, site, self.kind_of(site))
        return self.memory[key]

    def has_external_reads(self, region: str) -> bool:
        """Whether code around a region may read its parameters without calling it."""
        root = self.kind.root
        if any(contains(region, name) and not contains(region, code) for name, code in self.kind.layer.further_reads):
            return True
        outer = [n for n in parents(region) if not has_fast_path(type(submodule(root, n)))]
        names = own_parameters(submodule(root, region), region, recurse=True) if outer else []
        return any(
            next(parameter_reads(submodule(root, n), [relative(name, n) for name in names]), None) for n in outer
        )

    def place_in(self, region: str, states: dict[str, State], writes: set[str], site: Site) -> Placement | None:
        inline: frozenset[str] = frozenset()
        anchors: dict[str, Anchor] = {}
        for name, state in states.items():
            if state.weight is not None:
                module = relative(state.weight.module, self.layer)
                if not contains(region, module):
                    return None
                inline |= self.modules_between(region, module)
                continue
            nearest = self.nearest_anchor(state, name in writes, region, site)
            if nearest is None:
                return None
            anchors[name], inline = nearest[0], inline | nearest[1]
        return Placement(region, self.with_called_functions(region, inline), anchors)

    def with_called_functions(self, region: str, inline: frozenset[str]) -> frozenset[str]:
        """And the modules that entered code gives a function with a closure: as a leaf of the
        graph, such a module would call a function of the trace.
        """
        # Seen in: no transformers model, but the Annotated Transformer (`sublayer(x, lambda x: …)`)
        calls = [c for c in self.trace.calls if c.inlined and contains(region, c.name) and takes_closure(c)]
        while new := {c.name for c in calls if c.caller in inline} - inline:
            inline |= new
        return inline

    def nearest_anchor(
        self, state: State, write: bool, region: str, site: Site
    ) -> tuple[Anchor, frozenset[str]] | None:
        """The anchor of a state with the fewest modules to enter, if possible a defining one."""
        reachable: list[tuple[Anchor, frozenset[str]]] = []
        every, defining, uses = self.names_in_layer(state, site)
        for anchor in every:
            required = [anchor]
            if anchor not in defining:
                required += [a for a in (*defining, *uses) if aliases_may_diverge(anchor, a, self.trace)]
            paths = [frames_between(region, a, self.trace) for a in required]
            if None in paths:
                continue
            frames = frozenset[str]().union(*filter(None, paths))
            if anchor.kind == "in" and anchor.module == region and not frames:
                frames = self.mutating_modules(region, str(anchor.key[0]))
            if not write or may_write(anchor, frames, node_of(state, self.layer, site, self.trace)):
                reachable.append((anchor, frames))
        return min(reachable, key=lambda item: (len(item[1]), item[0] not in defining), default=None)

    def mutating_modules(self, region: str, argument: str) -> frozenset[str]:
        """The modules to enter whose code may write in place to an argument."""
        names = {c.name for c in self.trace.calls if c.inlined and contains(region, c.name)}
        result = frozenset[str]()
        for name in {*names, region} if names else ():
            cls = type(submodule(self.kind.root, name))
            if mutates_conditionally(inspect.unwrap(cls.forward), cls, argument if name == region else ""):
                result |= self.modules_between(region, name)
        return result

    def modules_between(self, outer: str, inner: str) -> frozenset[str]:
        """The modules through whose code `outer` reaches `inner`, both included."""
        nodes = (n for n in self.trace.graph.nodes if n.op == "call_module")
        callers = {str(n.target): str(n.meta["origin"][0]) for n in nodes}
        callers |= {c.name: c.caller for c in self.trace.calls}
        modules = {inner}
        while inner != outer:
            inner = callers.get(inner, inner.rpartition(".")[0])  # nothing calls it: its parent reads its parameters
            modules.add(inner)
        return frozenset(modules)


def takes_closure(call: ModuleCall) -> bool:
    """Whether a module is called with a function that has a closure."""
    return any(isinstance(value, FunctionType) and value.__closure__ for value in leaves(call.arguments))
