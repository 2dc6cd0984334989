"""The regions of a layer: the modules whose code edits change, with the states that they use."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch

from peftc.addressing.sites import ActivationRef, MatrixLayout, Site, State, WeightRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.shapes import Tokens
from peftc.modules.walk import submodule
from peftc.planning import ir
from peftc.planning.pass_edit import form_of_pass
from peftc.planning.pass_form import PassForm
from peftc.rewriting.anchors import Anchor, contains, frames_between, relative
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
from peftc.rewriting.passes.order import named_states, turns_of
from peftc.rewriting.placements import LayerPlacements, Placement
from peftc.rewriting.states import (
    activation_of,
    aliases_may_diverge,
    is_overwritten,
    node_of,
    state_of,
    steps_below_layer,
)
from peftc.runtime.parameters import stacked_slice


class LayerRegions(LayerPlacements):
    """The regions of one layer, for the edits of its sites."""

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
        edit_groups = self.join_readers(
            [(group, self.placement(group)) for group in group_by_state(first)], bool(turns)
        )
        placements = [(p, c) for group, c in edit_groups for p in group]
        placements += [(p, self.placement_beside_pass(p)) for p in site_edits if turns.get(id(p))]
        groups = self.merge_entered([c for _, c in placements])
        members: dict[str, list[tuple[ir.SiteEdit, Placement]]] = {region: [] for region in groups}
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
        whole = Placement("", frozenset(), {})
        return [self.region_edit(p, whole, "") for p in sorted(site_edits, key=innermost_first)]

    def merge_entered(self, placements: list[Placement]) -> dict[str, frozenset[str]]:
        """Regions with the modules they enter; an entered region joins the outer one."""
        groups: dict[str, frozenset[str]] = {}
        for c in placements:
            groups[c.region] = groups.get(c.region, frozenset()) | c.inline
        while pair := next(((o, i) for o, inline in groups.items() for i in groups if i != o and i in inline), None):
            outer, inner = pair
            groups[outer] = groups[outer] | groups.pop(inner) | self.modules_between(outer, inner)
        return groups

    def placement_beside_pass(self, site_edit: ir.SiteEdit) -> Placement:
        """A pass, and what acts after it, is in the layer's own code. Raises: P445."""
        if form_of_pass(site_edit) is not None:
            entered = frozenset({"", *(call.name for call in self.trace.calls if call.inlined)})
            return Placement("", entered, {})
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

    def region_edit(self, site_edit: ir.SiteEdit, placement: Placement, region: str) -> RegionEdit:
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
