"""Chooses, for each edit, the smallest module that contains every state that it reads or writes."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import fx

from peftc.addressing.sites import (
    ActivationRef,
    MatrixLayout,
    Site,
    State,
    WeightRef,
)
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Tokens
from peftc.modules.walk import submodule
from peftc.planning import ir
from peftc.planning.pass_edit import form_of_pass
from peftc.planning.pass_form import PassForm
from peftc.recognition.layer_types import LayerType
from peftc.rewriting.anchors import Anchor, calls_of, contains, frames_between, relative
from peftc.rewriting.edits import (
    Region,
    RegionEdit,
    RegionState,
    frozen_modules,
    group_by_state,
    innermost_first,
    used_states,
    written_states,
)
from peftc.rewriting.legality.bypasses import has_fast_path, own_parameters, parameter_reads, parents
from peftc.rewriting.legality.preconditions import check_gradients
from peftc.rewriting.passes.order import named_states, turns_of
from peftc.rewriting.states import (
    activation_of,
    aliases_may_diverge,
    definitions,
    is_overwritten,
    may_write,
    node_of,
    state_anchors,
    state_of,
    steps_below_layer,
)
from peftc.runtime.parameters import stacked_slice
from peftc.tracing.bytecode import mutates_conditionally
from peftc.tracing.in_place import leaves
from peftc.tracing.region_trace import ModuleCall


@dataclass(frozen=True)
class _Placement:
    """The region of edits, the modules to enter, and anchors, all relative to the layer."""

    region: str
    inline: frozenset[str]
    anchors: dict[str, Anchor]


class LayerRegions:
    """The regions of one layer, for the edits of its sites.

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

    def regions(self, site_edits: Sequence[ir.SiteEdit]) -> list[Region]:
        """The regions of this layer: those of another layer of the type with the same edits, if
        there is one, under other names.
        """
        if self.shared:
            return self.new_regions(site_edits)
        key = ("regions", id(self.kind), *map(edit_key, site_edits))
        if key not in self.memory:
            numbers = {id(p): i for i, p in enumerate(site_edits)}
            regions = self.new_regions(site_edits)
            members = [[numbers[id(p)] for p in region.site_edits] for region in regions]
            names = [relative(region.module, self.layer) for region in regions]
            first = [replace(region, edits=list(region.edits)) for region in regions]  # others may add to theirs
            self.memory[key] = list(zip(names, first, members, strict=True))
            return regions
        return [
            Region(f"{self.layer}.{name}".strip("."), r.inline, list(r.edits), [site_edits[i] for i in members])
            for name, r, members in self.memory[key]
        ]

    def new_regions(self, site_edits: Iterable[ir.SiteEdit]) -> list[Region]:
        site_edits = tuple(site_edits)
        turns = turns_of(site_edits)
        first = [p for p in site_edits if not turns.get(id(p))]  # what is in a part of the layer acts first
        placements = [(p, c) for group in group_by_state(first) for c in [self.placement(group)] for p in group]
        placements += [(p, self.placement_beside_pass(p)) for p in site_edits if turns.get(id(p))]
        groups = self.merge_entered([c for _, c in placements])
        members: dict[str, list[tuple[ir.SiteEdit, _Placement]]] = {region: [] for region in groups}
        for p, c in sorted(placements, key=lambda item: (turns.get(id(item[0]), 0), innermost_first(item[0]))):
            merged = next((region for region, inline in groups.items() if c.region in inline), c.region)
            members[c.region if c.region in groups else merged].append((p, c))
        regions: list[Region] = []
        for region, inline in groups.items():
            edits = [self.region_edit(p, c, region) for p, c in members[region]]
            entered = frozenset(relative(m, region) for m in inline)
            name = f"{self.layer}.{region}".strip(".")
            regions.append(Region(name, entered, edits, [p for p, _ in members[region]]))
        return regions

    def layer_edits(self, site_edits: Iterable[ir.SiteEdit]) -> list[RegionEdit]:
        """The edits in a region that is the whole layer."""
        whole = _Placement("", frozenset(), {})
        return [self.region_edit(p, whole, "") for p in sorted(site_edits, key=innermost_first)]

    def merge_entered(self, placements: list[_Placement]) -> dict[str, frozenset[str]]:
        """Regions with the modules they enter; an entered region joins the outer one."""
        groups: dict[str, frozenset[str]] = {}
        for c in placements:
            groups[c.region] = groups.get(c.region, frozenset()) | c.inline
        while pair := next(((o, i) for o, inline in groups.items() for i in groups if i != o and i in inline), None):
            outer, inner = pair
            groups[outer] = groups[outer] | groups.pop(inner) | self.modules_between(outer, inner)
        return groups

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

    def placement_beside_pass(self, site_edit: ir.SiteEdit) -> _Placement:
        """A pass, and what acts after it, is in the layer's own code. Raises: P445."""
        if form_of_pass(site_edit) is not None:
            entered = frozenset({"", *(call.name for call in self.trace.calls if call.inlined)})
            return _Placement("", entered, {})
        names, writes = used_states(site_edit), written_states(site_edit)
        states = {name: state_of(site_edit.site, name) for name in names}
        placement = self.place_in("", states, writes, site_edit.site)
        if placement is None or any(s.weight and s.weight.stacked_slice for s in states.values()):
            message = f"`{site_edit.edit}` at `{site_edit.site.path}` cannot be beside a pass in the code of its layer"
            span, help_ = site_edit.assigns[0].source.span, "let the pass be at other layers"
            raise PeftcError(Diagnostic("P445", message, span, help=help_))
        return placement

    def states_of_pass(self, form: PassForm) -> dict[str, RegionState]:
        """The states that a pass can name, by their names in the layer: `ffn.h`."""
        own = LayerRegions(self.kind, form.layer_sites[0].root, self.memory, kinds=self.kinds)
        states: dict[str, RegionState] = {}
        for site, name, state in named_states(form.layer_sites):
            nearest = own.nearest_anchor(state, False, "", site)
            if nearest is not None:
                states[name] = own.region_state(state, nearest[0], "", site)
        return states

    def region_edit(self, site_edit: ir.SiteEdit, placement: _Placement, region: str) -> RegionEdit:
        if (form := form_of_pass(site_edit)) is not None:
            return RegionEdit.of(site_edit, self.states_of_pass(form))
        states: dict[str, RegionState] = {}
        for name in used_states(site_edit):
            state, anchor = state_of(site_edit.site, name), placement.anchors.get(name)
            if state.weight is None and (anchor is None or region != placement.region):
                nearest = self.nearest_anchor(state, name in written_states(site_edit), region, site_edit.site)
                anchor = nearest and nearest[0]
            states[name] = self.region_state(state, anchor, region, site_edit.site)
        functions = {f: relative(relative(m, self.layer), region) for f, m in frozen_modules(site_edit).items()}
        parts = self.kind_of(site_edit.site).parts
        return RegionEdit.of(site_edit, states, functions, not any(contains(part, region) for part in parts))

    def region_state(self, state: State, anchor: Anchor | None, region: str, site: Site) -> RegionState:
        if state.weight is not None:
            module = relative(state.weight.module, self.layer)
            value = getattr(submodule(self.kind.root, module), state.weight.attribute)
            stacked = state.weight.stacked_slice
            if stacked is not None:
                value = stacked_slice(value, stacked.count, stacked.index)
                stacked = replace(stacked, reader="")
            weight = replace(state.weight, module=relative(module, region), stacked_slice=stacked)
            return RegionState(size=stored_row_count(value, weight), weight=weight)
        assert anchor is not None
        rows, is_tokens = activation_of(state).rows, isinstance(state.shape, Tokens)
        node = node_of(state, self.layer, site, self.trace)
        example = node.meta["example"]
        defining, aliases = self.names_in_region(state, anchor, region, site)
        dims = activation_of(state).dims
        maps = [s.activation.feature_map for s in site.states.values() if s.activation is not None]
        is_image = is_tokens and any(maps) and isinstance(example, torch.Tensor) and example.ndim > 3
        image = "channels first" if activation_of(state).feature_map else "channels last" if is_image else ""
        return RegionState(
            anchor.relative(region),
            rows,
            size=0 if not rows else _feature_count(example, activation_of(state)),
            flat=site.layer_input is not None and is_tokens and example.ndim == 2,
            image=image,
            dims=dims,
            kernel=activation_of(state).kernel,
            definitions=defining,
            aliases=aliases,
            overwritten=is_overwritten(anchor, region, node),
        )

    def names_in_region(
        self, state: State, anchor: Anchor, region: str, site: Site
    ) -> tuple[tuple[Anchor, ...], tuple[Anchor, ...]]:
        """The definitions and the aliases of a state in a region."""
        if anchor.kind == "argument":
            return (), ()
        own = (relative(site.module, self.layer), steps_below_layer(site))
        key = ("names", id(self.kind_of(site)), own, state, anchor, region)
        if key not in self.memory:
            every, defining, uses = self.names_in_layer(state, site)
            # two arguments of the region that are one value here need not be one in other calls
            aliases = [a for a in every if a == anchor or a.kind == "node" or a.module != region]
            sure = [a for a in aliases if not any(aliases_may_diverge(a, use, self.trace) for use in uses)]
            inside = [
                tuple(a.relative(region) for a in names if frames_between(region, a, self.trace) is not None)
                for names in (defining, [*(sure or aliases), *uses])
            ]
            self.memory[key] = inside[0], inside[1]
        return self.memory[key]

    def placement(self, group: list[ir.SiteEdit]) -> _Placement:
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
        key = (id(self.kind_of(first.site)), place, *map(tuple, map(sorted, (excluded, states, writes, functions))))
        if key not in self.memory:
            self.memory[key] = self.find_region(first, states, writes, functions, excluded)
        return self.memory[key]

    def find_region(
        self, first: ir.SiteEdit, states: dict[str, State], writes: set[str], functions: set[str], excluded: set[str]
    ) -> _Placement:
        site = first.site
        check_gradients({n: self.nodes_of(states[n], site) for n in sorted(writes)}, self.trace.graph)
        weights = [s.weight for s in states.values() if s.weight is not None]
        readers = [w.stacked_slice.reader for w in weights if w.stacked_slice is not None]
        if readers:  # the code that indexes a stacked parameter is not entered
            return _Placement(relative(readers[0], self.layer), frozenset(), {})
        for region in self.candidates():
            if region in excluded:
                continue
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

    def place_in(self, region: str, states: dict[str, State], writes: set[str], site: Site) -> _Placement | None:
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
        return _Placement(region, self.with_called_functions(region, inline), anchors)

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


def takes_closure(call: ModuleCall) -> bool:
    """Whether a module is called with a function that has a closure."""
    return any(isinstance(value, FunctionType) and value.__closure__ for value in leaves(call.arguments))


def _feature_count(value: torch.Tensor, place: ActivationRef) -> int:
    if place.dims is not None:
        return place.dims.width(tuple(value.shape))
    return value.shape[1 if place.feature_map else -1]


def stored_row_count(value: torch.Tensor, weight: WeightRef) -> int:
    """The rows of a parameter as (out, in)."""
    layout = weight.layout or MatrixLayout((1, 0) if weight.transposed else (0,), 1)
    return prod(value.shape[dim] for dim in layout.order[: layout.rows])


def edit_key(site_edit: ir.SiteEdit) -> object:
    """Equal for edits at two layers of one type that have the same equations, as one object."""
    site = site_edit.site
    return site_edit.edit, site.steps_in_layer, id(site_edit.assigns), id(site_edit.lets), len(site.shared_with)
