"""Writes LoRA, its relatives and (IA)³ for AdapterHub."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.exchange.adapterhub.bottlenecks import GATE
from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key, left_out, subsites
from peftc.exchange.adapterhub.low_rank_forms import DORA, MTL, VERA
from peftc.exchange.adapterhub.low_rank_forms import FORMS as LOW_RANK
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.terms import Product, text

FORMS = frozenset({"lora", "vector", "vera_matrices", "mtl_lora", DORA})
MATRICES = ("q", "k", "v")
_LINEARS = {"up": "intermediate_lora", "down": "output_lora"}
_SCALE = {"lora_B": "vector.scale"}
_OWN_SCALE = frozenset({"vera_matrices", "mtl_lora"})
# The names of parameters by the library's, for each form.
_TENSORS = {call.partition("(")[0]: form for form in LOW_RANK for call in (form.call, (form.change or ("",))[0])}


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
    tensors = {key(places.prefix, "shared_parameters", end): tensor for end, tensor in _common(parts[0], places)}
    for module, own in modules.items():
        for end, tensor in _joined(own, module, names, places).items():
            tensors[key(module, "loras", end)] = tensor
    return Written(config, tensors)


def _joined(own: dict[str, EditPart], module: str, names: set[str], places: HubPlaces) -> dict[str, Tensor]:
    """The tensors of a module; of q, k and v of a fused Linear one below the other."""
    parts = [own[site.path] for site in places.projections(module) if site.path in own]
    named = [_tensors(part) for part in parts]
    return {end: torch.cat([one[end] for one in named]) for end in named[0]}


def _form(part: EditPart) -> str:
    return next((name for name in _TENSORS if name in part.forms), "")


def _tensors(part: EditPart) -> dict[str, Tensor]:
    if (name := _form(part)) not in part.forms:
        named = part.named(_SCALE)
        named["lora_B"] = named["lora_B"].reshape(-1, 1)
    else:
        named = part.named({end: f"{name}.{ours}" for end, ours in _TENSORS[name].tensors.items()})
    if DORA in part.forms:
        named["m.weight"] = part.tensors[f"{DORA}.m"].reshape(-1, 1)
    return named | part.named({end: end for end in GATE})


def _common(part: EditPart, places: HubPlaces) -> Iterator[tuple[str, Tensor]]:
    """What all sites have in common. Raises: P801."""
    name = _form(part)
    for end, ours in (_TENSORS[name].common or {}).items() if name else ():
        if not places.prefix or places.prefix not in places.modules:
            raise part.no_form("without a head the library does not save the matrices that all Linears share")
        yield end, part.tensors[f"{name}.{ours}"]


def _config(part: EditPart) -> dict[str, Any]:
    added, name = part.product(), _form(part)
    if DORA in part.forms and name and (change := part.product("w")) is not None:
        return _added(part, change[0], name) | {"use_dora": True}
    if added is not None and [text(one) for one in added[1]] == ["h"] and name in added[0].calls:
        return _added(part, added[0], name)
    if added is not None and not added[1] and "vector" in added[0].calls:
        return _scaled(part, added[0])
    raise part.no_form("the library has `h += … lora(x, …)`, `h *= … vector()`, and VeRA, DoRA and MTL-LoRA of its own")


def _added(part: EditPart, own: Product, name: str) -> dict[str, Any]:
    instance = own.calls[name].instance
    args = instance.form.fill(instance.args)
    rank: Any = args["r"]
    has_scale = name in _OWN_SCALE
    alpha: Any = args["alpha"] if has_scale else own.number * rank
    alpha = rank if alpha is None or alpha == "r" else alpha
    if alpha <= 0 or (not has_scale and alpha / rank != own.number):
        raise part.no_form("no `alpha` gives its scale, bit for bit")
    config = _common_config("add", "gate" in own.calls, alpha, rank, args.get("dropout", 0.0))
    if _TENSORS[name] is VERA:
        config |= {"vera_d": 0.1, "vera_b": 0.0, "init_weights": "vera"}
    if _TENSORS[name] is MTL:
        config |= {"architecture": "mtl_lora", "n_up_projection": args["n"], "weights_sharpness": args["sharpness"]}
        config["task_specific_matrix_type"] = "singular_values"
    return config


def _scaled(part: EditPart, own: Product) -> dict[str, Any]:
    gated = len(part.site_edit.assigns) == 2
    if gated and (second := part.product(index=1)) is not None and set(second[0].calls) != {"gate"}:
        raise part.no_form("behind a scale the library has a gate, `h *= gate(x)`")
    return _common_config("scale", gated, own.number, 1, 0.0)


def _common_config(mode: str, gated: bool, alpha: float, rank: int, dropout: Any) -> dict[str, Any]:
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
