"""Regions of edits outside the layers, at the boundary of a module or of its parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import nn

from peftc.addressing.sites import INPUT, OUTPUT, TABLE_IDS, WeightRef
from peftc.modules.walk import submodule
from peftc.planning import ir
from peftc.rewriting.anchors import Anchor, relative
from peftc.rewriting.edits import Region, RegionEdit, RegionState, frozen_modules, used_states
from peftc.rewriting.regions import stored_row_count
from peftc.rewriting.states import activation_of
from peftc.tracing.module_calls import forward_signature

_BOUNDARIES: Mapping[str, Literal["in", "out", "ids"]] = {INPUT: "in", OUTPUT: "out", TABLE_IDS: "ids"}


def module_region(site_edits: list[ir.SiteEdit], region: str, model: nn.Module) -> Region:
    """The region of edits outside the layers."""
    module = submodule(model, region)
    edits: list[RegionEdit] = []
    inline = frozenset[str]()
    for p in site_edits:
        states: dict[str, RegionState] = {}
        for name in used_states(p):
            state = p.site.states[name]
            if state.weight is not None:
                inner = relative(state.weight.module, region)
                size = _stored_rows(state.weight, model) if state.weight.rows and not state.weight.stacked_slice else 0
                states[name] = RegionState(size=size, weight=replace(state.weight, module=inner))
                inline |= {".".join(inner.split(".")[:i]) for i in range(inner.count(".") + 2)}
            else:
                activation = activation_of(state)
                kind = _BOUNDARIES[activation.node]
                inline |= {""} if kind == "ids" else set()
                path = activation.key_path
                if kind == "in" and not path:
                    path = tuple(forward_signature(module).parameters)[1:2]
                image = "channels first" if activation.feature_map else ""
                anchor = Anchor(kind, "", path)
                whole = None if activation.rows is None else p.site.states["w"].weight
                size = 0 if whole is None else _stored_rows(whole, model)
                states[name] = RegionState(anchor, activation.rows, size, image=image, kernel=activation.kernel)
        edits.append(RegionEdit.of(p, states, {f: relative(m, region) for f, m in frozen_modules(p).items()}))
    return Region(region, inline, edits, site_edits)


def _stored_rows(weight: WeightRef, model: nn.Module) -> int:
    """The rows of a whole parameter, of which a site may have some."""
    return stored_row_count(getattr(submodule(model, weight.module), weight.attribute), weight)
