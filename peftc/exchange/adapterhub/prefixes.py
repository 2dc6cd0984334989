"""Prefix tuning of AdapterHub: keys and values themselves, or made by an MLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.bottlenecks import activation, leave_out
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown
from peftc.exchange.spec_text import unfit

MLP = {
    "wte.weight": "prefix.embedding",
    "control_trans.0.weight": "prefix.down",
    "control_trans.0.bias": "prefix.down_bias",
    "control_trans.2.weight": "prefix.up",
    "control_trans.2.bias": "prefix.up_bias",
}
ROWS = "control_trans"
# What the tensors tell, or first values.
_IGNORED = ("encoder_prefix", "cross_prefix", "leave_out", "prefix_length", "bottleneck_size", "init_weights_seed")
Pools = Mapping[str, Mapping[str, Tensor]]  # by the group of attentions


def prefixes(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    pools, gates = _pools(adapter), defaultdict[str, dict[str, Tensor]](dict)
    for one in adapter.of("prefix_gates"):
        module = places.module(one.owner.removesuffix(".prefix_tuning"))
        gates[places.attention(module).path][f"gate.{one.end}"] = one.value
    for config in (one for one in adapter.configs if one.values.get("architecture") == "prefix_tuning"):
        if not pools:
            raise damaged("the configuration has prefixes, and the adapter has no tensors of them")
        left = set(pools)
        for group, sites in groups(config, places).items():
            if group in pools:
                left.discard(group)
                _check_positions(sites, places)
                yield from _parts(config, sites, pools[group], gates)
            elif sites:
                raise damaged(f"the configuration is for `{sites[0].path}`, too, and the adapter has no tensors of it")
        if left:
            raise unfit(f"the model has no attentions for `{min(left)}`")
        if dropout := config.number("dropout", 0.0):
            adapter.notes[f"left out: dropout={shown(dropout)}, which acts while training alone"] = None
        config.finish((*_IGNORED, "shared_gating", "non_linearity", "flat"))


def _check_positions(sites: list[Site], places: HubPlaces) -> None:
    for site in sites:
        if places.has_relative_positions(site):
            message = f"`{site.path}` has relative positions, which the library counts from the prefix on"
            raise PeftcError(Diagnostic("P802", message, help="there is no equation for it"))


def _pools(adapter: HubAdapter) -> dict[str, dict[str, Tensor]]:
    """Each attention saves the tensors of all. Raises: P803 where they differ."""
    pools = defaultdict[str, dict[str, Tensor]](dict)
    for one in adapter.of("prefix_tunings"):
        group, _, end = one.end.partition(".")
        before = pools[group].setdefault(end, one.value)
        if before.shape != one.value.shape or not before.equal(one.value):
            raise damaged(f"`{one.key}` has other values than the same tensor of another layer")
    return pools


def groups(config: PeftConfig, places: HubPlaces) -> dict[str, list[Site]]:
    """The attentions with prefixes, by the library's names of their groups."""
    chosen: dict[str, list[Site]] = {}
    has_decoder = any(site.steps[0][0] == "decoder" for site in places.sublayers)
    for site in places.sublayers:
        kind, left = site.steps[-1][0], leave_out(config)
        if kind == "ffn" or places.layer_number(site) in left:
            continue
        if kind == "self":
            kind = "encoder" if has_decoder and site.steps[0][0] == "encoder" else "self"
        if kind == "self" or config.values.get(f"{kind}_prefix", True):
            chosen.setdefault(f"{kind}_prefix", []).append(site)
    return chosen


def _parts(
    config: PeftConfig, sites: list[Site], pool: Mapping[str, Tensor], gates: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[SitePart]:
    flat, gating = config.flag("flat"), config.flag("use_gating")
    if set(pool) != ({ROWS} if flat else set(MLP)):
        raise damaged(f"the configuration has `flat: {flat}`, and the prefixes are {', '.join(sorted(pool))}")
    if gating and config.values.get("shared_gating", True) is not True:
        raise refusal("shared_gating", False, "there is no equation for a gate of keys and another of values")
    if not flat and activation(config) != "tanh":
        raise refusal("non_linearity", config.values.get("non_linearity"), "the MLP of a prefix has tanh")
    length = int(config.number("prefix_length", 30)) if flat else len(pool["wte.weight"])
    options = "" if flat else f", reparam=mlp({len(pool['control_trans.0.bias'])}), keep=true"
    form = f"prefix(len={length}, reparam=none)" if flat else f"prefix(len={length}{options})"
    for number, site in enumerate(sites):
        if gating != (site.path in gates):
            raise damaged(f"the configuration has `use_gating: {gating}`, and `{site.path}` disagrees")
        tensors = _rows(pool[ROWS], length, len(sites), number, site) if flat else {MLP[e]: t for e, t in pool.items()}
        factor = "gate(x) * " if gating else ""
        yield SitePart("prefix", site, (f"kv = concat({factor}{form}, kv)",), {**tensors, **gates.get(site.path, {})})


def _rows(pool: Tensor, length: int, layers: int, number: int, site: Site) -> dict[str, Tensor]:
    """Of a vector with the entries [rows, layers, keys and values, heads, features]."""
    shape = site.states["k"].shape
    heads = getattr(shape, "heads", None)
    if heads is None or pool.numel() % (length * layers * 2 * heads):
        raise unfit(f"a prefix of {pool.numel()} numbers does not fit {layers} attentions and {length} rows")
    rows = pool.reshape(length, layers, 2, heads, -1)[:, number].permute(1, 2, 0, 3)
    return {"prefix.key": rows[0], "prefix.value": rows[1]}
