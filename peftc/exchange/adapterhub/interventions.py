"""ReFT of AdapterHub: interventions behind layers, at the first and at the last tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.bottlenecks import activation
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

ARCHITECTURE = "reft"
# The tensors of a unit.
WEIGHT, BIAS = "learned_source.weight", "learned_source.bias"
PROJECTION = "projection.weight"
REFLECTIONS, BASE = "projection.parametrizations.weight.original", "projection.parametrizations.weight.0.base"
_FREE = {"R": PROJECTION, "W": WEIGHT, "b": BIAS}
# By form, the library's names of its parameters.
NAMES = {"loreft": {"X": REFLECTIONS, "W": WEIGHT, "b": BIAS, "base": BASE}, "reft": _FREE, "reft_pair": _FREE}
LOREFT = """
# An intervention in a subspace whose rows of R are orthonormal: reflections, behind a frozen rotation. With two units
# the first tokens and the last ones have parameters of their own. Where a token is both, those of the last ones hold.
# Wu et al. 2024, arXiv:2404.03592, Eq. 2 (LoReFT); R as torch.nn.utils.parametrizations.orthogonal has it
form loreft(
    x,
    r,  # rank of the subspace
    units = 1,  # sets of parameters
    first = none,  # acts on so many tokens at the start of each sequence
    last = none,  # acts on so many tokens at the end of each input
    subtract = true,  # whether R h is taken off
    act = none,  # activation of W h + b
) {
    require r < d(x)
    require units <= 2
    param X[units, r, d(x)] = 0
    param W[units, r, d(x)] = kaiming
    param b[units, r] = 0
    fixed base[units, d(x), d(x)] = buffer
    fixed signs[units, r] = buffer
    fixed above[r, d(x)] = buffer
    fixed diagonal[r, d(x)] = identity

    # Products of reflections I - 2 v vᵀ / ‖v‖² as I - Vᵀ T V, of which the first r columns count.
    let last_unit = units - 1
    let triangle = corner(above + 0.5 * diagonal, r, r)
    let V = diagonal + above * X[0]
    let T = inverse(triangle * (V @ t(V)))
    let frame = diagonal - corner(t(V), r, r) @ t(T) @ V
    let R = column(signs[0]) * frame @ t(base[0])
    let last_V = diagonal + above * X[last_unit]
    let last_T = inverse(triangle * (last_V @ t(last_V)))
    let last_frame = diagonal - corner(t(last_V), r, r) @ t(last_T) @ last_V
    let last_R = column(signs[last_unit]) * last_frame @ t(base[last_unit])
    let source = act(W[0] @ x + b[0])
    let last_source = act(W[last_unit] @ x + b[last_unit])
    let start = t(R) @ (source - R @ x) if subtract
    let start = t(R) @ source if subtract == false
    let end = t(last_R) @ (last_source - last_R @ x) if subtract
    let end = t(last_R) @ last_source if subtract == false
    f = positions(start, first, last) if units == 1
    let early = positions(start, first, none)
    f = early - positions(early, none, last) + positions(end, none, last) if units == 2
}
"""
REFT_PAIR = """
# Interventions at the first tokens and at the last ones. With two units these have parameters of their own. Where a
# token is both, those of the last ones hold.
# Wu et al. 2024, arXiv:2404.03592, without the constraint of Eq. 2 (NoReFT), and Eq. 3 (DiReFT)
form reft_pair(
    x,
    r,  # rank of the subspaces
    units = 1,  # sets of parameters
    first = none,  # acts on so many tokens at the start of each sequence
    last = none,  # acts on so many tokens at the end of each input
    subtract = true,  # whether R h is taken off
    act = none,  # activation of W h + b
) {
    require units <= 2
    param R[units, r, d(x)] = uniform(1 / sqrt(d(x)))
    param W[units, r, d(x)] = kaiming
    param b[units, r] = 0
    let last_unit = units - 1
    let source = act(W[0] @ x + b[0])
    let last_source = act(W[last_unit] @ x + b[last_unit])
    let start = t(R[0]) @ (source - R[0] @ x) if subtract
    let start = t(R[0]) @ source if subtract == false
    let end = t(R[last_unit]) @ (last_source - R[last_unit] @ x) if subtract
    let end = t(R[last_unit]) @ last_source if subtract == false
    f = positions(start, first, last) if units == 1
    let early = positions(start, first, none)
    f = early - positions(early, none, last) + positions(end, none, last) if units == 2
}
"""
_IGNORED = ("layers", "output_reft", "init_weights_seed", "dtype", "r", "tied_weights", "architecture")


def interventions(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    own = defaultdict[str, dict[int, dict[str, Tensor]]](lambda: defaultdict(dict))
    for one in adapter.of("refts"):
        _, number, end = _split(one.key, one.end)
        own[one.owner.removesuffix(".reft_layer")][number][end] = one.value
    for config in (one for one in adapter.configs if one.values.get("architecture") == ARCHITECTURE):
        if not own:
            raise damaged("the configuration has ReFT, and the adapter has no tensors of it")
        if places.has_decoder_behind_encoder:
            message = "the library counts the tokens of a decoder by the mask of the encoder"
            raise PeftcError(Diagnostic("P802", f"the adapter has ReFT of an encoder and a decoder: {message}"))
        if "subtract_projection" not in config.values and not config.flag("orthogonality"):
            adapter.notes["read as NoReFT: the library saves no `subtract_projection`, which tells DiReFT from it"] = (
                None
            )
        if dropout := config.number("dropout", 0.05):
            adapter.notes[f"left out: dropout={shown(dropout)}, which acts while training alone"] = None
        _check_complete(config, places, own)
        for owner, units in own.items():
            yield _part(adapter, config, places.layer(owner), units)
        config.finish((*_IGNORED, "non_linearity"))


def _split(key: str, end: str) -> tuple[str, int, str]:
    """`units.0.learned_source.bias`. Raises: P802."""
    units, number, rest = (*end.split(".", 2), "", "")[:3]
    if units != "units" or not number.isdigit():
        raise PeftcError(Diagnostic("P802", f"the adapter has a tensor `{key}`, for which there is no equation"))
    return units, int(number), rest


def _check_complete(config: PeftConfig, places: HubPlaces, own: Mapping[str, object]) -> None:
    """Raises: P803 where tensors are missing, which the library would draw."""
    chosen, present = config.read("layers", "all"), {places.layer(owner).path for owner in own}
    for site in places.layers:
        if (chosen == "all" or places.layer_number(site) in chosen) != (site.path in present):
            raise damaged(f"the configuration has `layers: {chosen}`, and `{site.path}` disagrees")


def _part(adapter: HubAdapter, config: PeftConfig, site: Site, units: Mapping[int, Mapping[str, Tensor]]) -> SitePart:
    ends = {name: int(config.number(f"{name}_positions", default)) for name, default in (("prefix", 3), ("suffix", 0))}
    is_orthogonal, is_tied = config.flag("orthogonality"), config.flag("tied_weights")
    projection = (REFLECTIONS, BASE) if is_orthogonal else (PROJECTION,)
    if set(units) != ({0} if is_tied else {0, 1}) or any(set(u) != {WEIGHT, BIAS, *projection} for u in units.values()):
        raise damaged(f"`{site.path}` has not the units of ReFT that the configuration says")
    if not any(ends.values()):
        raise refusal("prefix_positions", 0, "without `suffix_positions` it changes no token")
    numbers = [0] if is_tied else [number for number, count in enumerate(ends.values()) if count]
    if len(numbers) < len(units):
        adapter.notes["left out: what the library keeps for no tokens"] = None
    own = [units[number] for number in numbers]
    form, text, tensors = _loreft(own) if is_orthogonal else _free(config, own)
    rank = len(own[0][WEIGHT])
    if config.whole("r", 1) != rank:
        raise damaged(f"`{site.path}` has the rank {rank}, and the configuration {config.values.get('r')}")
    where = "".join(f", {ours}={count}" for ours, count in zip(("first", "last"), ends.values(), strict=True) if count)
    options = ", units=2" if text and len(own) == 2 else ""
    options += ", subtract=false" if config.read("subtract_projection", True) is False else ""
    options += f", act={activation(config)}" if text and config.values.get("non_linearity") is not None else ""
    call = f"{form}(h, r={rank}{'' if text else ', orthogonal=false'}{options}{where})"
    return SitePart("reft", site, (f"h += {call}",), tensors, (text,) if text else ())


def _loreft(units: Sequence[Mapping[str, Tensor]]) -> tuple[str, str, dict[str, Tensor]]:
    """The entries above the diagonal of X are reflections, its diagonal the signs of rows of R."""
    own = {f"loreft.{ours}": _joined(units, end) for ours, end in NAMES["loreft"].items()}
    rows = own["loreft.X"]
    signs = rows.diagonal(dim1=-2, dim2=-1).int().to(rows.dtype)  # as the library: what is below 1 is 0
    return "loreft", LOREFT, own | {"loreft.signs": signs, "loreft.above": torch.ones_like(rows[0]).triu(1)}


def _free(config: PeftConfig, units: Sequence[Mapping[str, Tensor]]) -> tuple[str, str, dict[str, Tensor]]:
    if len(units) == 1 and config.values.get("non_linearity") is None:
        return "reft", "", {f"reft.{ours}": units[0][end] for ours, end in _FREE.items()}
    return "reft_pair", REFT_PAIR, {f"reft_pair.{ours}": _joined(units, end) for ours, end in _FREE.items()}


def _joined(units: Sequence[Mapping[str, Tensor]], end: str) -> Tensor:
    shapes = {unit[end].shape for unit in units}
    if len(shapes) > 1:
        raise damaged(f"`{end}` has the shapes {', '.join(map(str, map(list, shapes)))}")
    return torch.stack([unit[end] for unit in units])
