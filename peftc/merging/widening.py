"""Bottlenecks beside ffns become hidden units: wider tensors, and a new configuration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from peftc.folding.ffn_width import HiddenUnits, Widening, width_of
from peftc.merging.base_model import BaseModel
from peftc.merging.layout import Changes
from peftc.models.skeleton import meta_model


def plan_widening(
    base: BaseModel, folded: Collection[str], others: Collection[str], changes: Changes
) -> tuple[dict[str, list[HiddenUnits]], dict[str, str]]:
    """The new units by the path of their ffn, and why an edit makes none.

    Args: `folded`: the edits that are in the weights before. `others`: those that are not to be
    asked. `changes`: gets the new shapes, and the new values of the configuration.
    """
    widening = Widening(base.model, None, None, None)
    widening.folded_first = (*folded, *others)
    units, reasons = widening.all_units()
    for edit in [edit for edit, own in units.items() if any(reason := _lacking(base, one) for one in own)]:
        reasons[edit] = next(reason for one in units[edit] if (reason := _lacking(base, one)))
        del units[edit]
    layers: dict[str, list[HiddenUnits]] = defaultdict(list)
    for one in (one for own in units.values() for one in own):
        layers[one.up.path.rpartition(".")[0]].append(one)
    shapes = {name: shape for own in layers.values() for name, shape in _shapes(base, own).items()}
    widths = {(width_of(own[0].up), width_of(own[0].up) + sum(len(one.rows) for one in own)) for own in layers.values()}
    values = _configuration(base, widths, shapes) if layers else {}
    if values is None:
        reason = "not wider: no key of the configuration has the width of these ffns alone"
        return {}, reasons | dict.fromkeys(units, reason)
    changes.configuration |= values
    for name, shape in shapes.items():
        for group in base.keys(name).values():
            changes.tensors[group.keys[0]] = (base.checkpoint.entries[group.keys[0]].dtype, shape)
    return dict(layers), reasons


def _lacking(base: BaseModel, units: HiddenUnits) -> str:
    """Why an ffn cannot hold some units; "" if it can."""
    up, down = (f"{site.module}.bias" for site in (units.up, units.down))
    if units.biases is not None and up not in base.parameters:
        return f"not wider: `{up}` would be a new key of the checkpoint, which its class does not read"
    if units.constant is not None and down not in base.parameters:
        return f"not wider: `{down}` would be a new key of the checkpoint, which its class does not read"
    names = (name for site in (units.up, units.down) for name in base.parameters if name.startswith(f"{site.module}."))
    converted = [n for n in names if any(group.converter is not None for group in base.keys(n).values())]
    return f"not wider: `{converted[0]}` is made of several tensors of the checkpoint" if converted else ""


def _shapes(base: BaseModel, units: list[HiddenUnits]) -> dict[str, tuple[int, ...]]:
    """The new shapes of the parameters of one ffn, by name."""
    up, down, more = units[0].up, units[0].down, sum(len(one.rows) for one in units)
    shapes = dict[str, tuple[int, ...]]()
    for site, at in ((up, 0), (down, 1)):
        weight = site.states["w"].weight
        assert weight is not None
        name, dim = f"{site.module}.{weight.attribute}", 1 - at if weight.transposed else at
        shape = list(base.parameters[name].shape)
        shape[dim] += more
        shapes[name] = tuple(shape)
    if (bias := f"{up.module}.bias") in base.parameters:
        shapes[bias] = (base.parameters[bias].shape[0] + more,)
    return shapes


def _configuration(
    base: BaseModel, widths: Collection[tuple[int, int]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any] | None:
    """The keys that take the new width; None if a model with them has other shapes than these."""
    if len(widths) != 1:
        return None
    ((old, new),) = widths
    config: Any = deepcopy(base.source.config)
    names = [name for name, value in config.to_dict().items() if value == old and type(value) is int]
    for name in names:
        setattr(config, name, new)
    try:
        model = meta_model(replace(base.source, config=config))
    except Exception:  # a model's __init__ raises whatever its own checks raise
        return None
    own = dict(model.named_parameters(remove_duplicate=False))
    fits = all(shapes.get(n, tuple(p.shape)) == tuple(own[n].shape) for n, p in base.parameters.items() if n in own)
    return dict.fromkeys(names, new) if fits and names else None
