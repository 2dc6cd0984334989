"""Writes LoRA and (IA)³ for AdapterHub."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key, left_out, subsites
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.terms import Product, text

FORMS = frozenset({"lora", "vector"})
MATRICES = ("q", "k", "v")
_LINEARS = {"up": "intermediate_lora", "down": "output_lora"}
_TENSORS = {"lora_A": "lora.A", "lora_B": "lora.B", "gate.weight": "gate.weight", "gate.bias": "gate.bias"}
_SCALE = {"lora_B": "vector.scale"}


def write_low_rank(parts: Sequence[EditPart], places: HubPlaces) -> Written:
    """One configuration for all. Raises: P801."""
    config = _config(parts[0])
    for part in parts:
        if (own := _config(part)) != config:
            raise part.no_form(f"the library has one LoRA or (IA)³ for all sites, here with {own}, elsewhere {config}")
        if part.site.steps[-1][0] not in (*MATRICES, *_LINEARS):
            raise part.no_form("the library has none there: at q, k and v of attentions, and up and down of ffns")
    names = {part.site.steps[-1][0] for part in parts}
    left = left_out(parts, subsites(places, names), places)
    config |= {"attn_matrices": [name for name in MATRICES if name in names], "leave_out": left}
    config |= {"selfattn_lora": not names.isdisjoint(MATRICES), **{flag: n in names for n, flag in _LINEARS.items()}}
    modules = defaultdict[str, dict[str, EditPart]](dict)
    for part in parts:
        modules[part.site.module][part.site.path] = part
    tensors = dict[str, Tensor]()
    for module, own in modules.items():
        for end, tensor in _joined(own, module, names, places).items():
            tensors[key(module, "loras", end)] = tensor
    return Written(config, tensors)


def _joined(own: dict[str, EditPart], module: str, names: set[str], places: HubPlaces) -> dict[str, Tensor]:
    """The tensors of a module; of q, k and v of a fused Linear one below the other."""
    parts = [own[site.path] for site in places.projections(module) if site.path in own]
    named = [_tensors(part) for part in parts]
    return {end: torch.cat([one[end] for one in named]) for end in named[0]}


def _tensors(part: EditPart) -> dict[str, Tensor]:
    named = part.named(_TENSORS) | part.named(_SCALE)
    if "vector" in part.forms:
        named["lora_B"] = named["lora_B"].reshape(-1, 1)
    return named


def _config(part: EditPart) -> dict[str, Any]:
    added = part.product()
    if added is not None and [text(one) for one in added[1]] == ["h"] and "lora" in added[0].calls:
        return _added(part, added[0])
    if added is not None and not added[1] and "vector" in added[0].calls:
        return _scaled(part, added[0])
    raise part.no_form("the library has `h += … lora(x, …)` and `h *= … vector()`")


def _added(part: EditPart, own: Product) -> dict[str, Any]:
    args = own.calls["lora"].instance.form.fill(own.calls["lora"].instance.args)
    rank: Any = args["r"]
    alpha = own.number * rank
    if alpha / rank != own.number or alpha <= 0 or len(part.site_edit.assigns) != 1:
        raise part.no_form("no `alpha` gives its scale, bit for bit")
    return _common("add", "gate" in own.calls, alpha, rank, args["dropout"])


def _scaled(part: EditPart, own: Product) -> dict[str, Any]:
    gated = len(part.site_edit.assigns) == 2
    if gated and (second := part.product(index=1)) is not None and set(second[0].calls) != {"gate"}:
        raise part.no_form("behind a scale the library has a gate, `h *= gate(x)`")
    return _common("scale", gated, own.number, 1, 0.0)


def _common(mode: str, gated: bool, alpha: float, rank: int, dropout: Any) -> dict[str, Any]:
    return {
        "architecture": "lora",
        "composition_mode": mode,
        "use_gating": gated,
        "alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "r": rank,
        "dropout": dropout,
        "init_weights": "lora" if mode == "add" else "ia3",
        "use_dora": False,
    }
