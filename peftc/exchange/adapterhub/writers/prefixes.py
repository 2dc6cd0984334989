"""Writes prefix tuning for AdapterHub, with the MLP that makes its rows or as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key, left_out
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.prefixes import MLP, ROWS, groups
from peftc.exchange.adapterhub.terms import Product
from peftc.exchange.peft_format.config import PeftConfig
from peftc.planning import ir

FORMS = frozenset({"prefix"})
_MODULE = "prefix_tuning"


def write_prefixes(parts: Sequence[EditPart], places: HubPlaces) -> Written:
    """One configuration for all attentions. Raises: P801."""
    config = _config(parts[0])
    for part in parts:
        if (own := _config(part)) != config:
            raise part.no_form(f"the library has one prefix for all attentions, here with {own}, elsewhere {config}")
    own = {part.site.path: part for part in parts}
    every = groups(PeftConfig({}), places)
    chosen = {group: sites for group, sites in every.items() if any(site.path in own for site in sites)}
    expected = [site for group, sites in every.items() if group in chosen or group == "self_prefix" for site in sites]
    kinds = ("encoder_prefix", "cross_prefix")
    config |= {kind: kind in chosen or kind not in every for kind in kinds}
    config["leave_out"] = left_out(parts, expected, places)
    pools = {
        f"{group}.{end}": tensor
        for group, sites in chosen.items()
        for end, tensor in _pool(config, [own[site.path] for site in sites if site.path in own]).items()
    }
    owners = [_attention(site.path, places) for site in places.sublayers if site.steps[-1][0] != "ffn"]
    holders = [*(f"{owner}.{_MODULE}.pool" for owner in owners), f"{places.prefix}.{_MODULE}".lstrip(".")]
    if places.prefix not in places.modules:
        holders[-1] = _MODULE
    tensors = {key(holder, "prefix_tunings", end): tensor for holder in holders for end, tensor in pools.items()}
    for part in parts if config["use_gating"] else ():
        owner = f"{_attention(part.site.path, places)}.{_MODULE}"
        tensors |= {key(owner, "prefix_gates", end): part.tensors[f"gate.{end}"] for end in ("weight", "bias")}
    return Written(config, tensors)


def _attention(path: str, places: HubPlaces) -> str:
    """The module in whose code the library joins rows: the one around the queries' Linear."""
    return places.sites[f"{path}.q"].module.rpartition(".")[0]


def _config(part: EditPart) -> dict[str, Any]:
    assign = part.site_edit.assigns[0]
    own = Product.of(assign.value.parts[0]) if isinstance(assign.value, ir.Concat) else None
    if own is None or own.number != 1 or set(own.calls) - {"gate"} != {"prefix"}:
        raise part.no_form("the library has `kv = concat(prefix(…), kv)`, and `gate(x)` before it")
    args = own.calls["prefix"].instance.form.fill(own.calls["prefix"].instance.args)
    reparam: Any = args["reparam"]
    flat = reparam is None or reparam == "none"
    return {
        "architecture": "prefix_tuning",
        "flat": flat,
        "prefix_length": args["len"],
        "bottleneck_size": len(part.tensors[MLP["control_trans.0.bias"]]) if not flat else 512,
        "non_linearity": "tanh",
        "dropout": 0.0,
        "use_gating": "gate" in own.calls,
        "shared_gating": True,
    }


def _pool(config: Mapping[str, Any], parts: Sequence[EditPart]) -> dict[str, Tensor]:
    """Of the MLP, or the entries [rows, layers, keys and values, heads, features]."""
    if not config["flat"]:
        return parts[0].named(MLP)
    rows = [torch.stack([part.tensors[f"prefix.{name}"] for name in ("key", "value")]) for part in parts]
    return {ROWS: torch.stack(rows).permute(3, 0, 1, 2, 4).flatten()}
