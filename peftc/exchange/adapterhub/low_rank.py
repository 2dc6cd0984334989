"""LoRA, its relatives and (IA)³ of AdapterHub: at Linears, also at q, k and v of a fused one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.bottlenecks import GATE
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.low_rank_forms import LORA, MAGNITUDE_RATIO, LowRankForm, form_of, numbers
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

ARCHITECTURES = ("lora", "mtl_lora")
# What the tensors tell, or first values.
_IGNORED = (
    *("selfattn_lora", "intermediate_lora", "output_lora", "attn_matrices", "leave_out", "init_weights"),
    *("init_weights_seed", "dtype", "alpha", "r"),
)


def low_rank(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    own = defaultdict[str, dict[str, Tensor]](dict)
    for one in adapter.of("loras"):
        own[places.module(one.owner)][one.end] = one.value
    shared = {one.end: one.value for one in adapter.of("shared_parameters")}
    for config in (one for one in adapter.configs if one.values.get("architecture") in ARCHITECTURES):
        if not own:
            raise damaged("the configuration has LoRA, and the adapter has no tensors of it")
        for module, tensors in own.items():
            yield from _parts(config, module, tensors, places, shared)
        dropout = config.number("dropout", 0.0)
        if dropout and config.flag("use_dora"):
            adapter.notes[f"left out: dropout={shown(dropout)}, which acts while training alone"] = None
        config.finish(_IGNORED)


def _parts(
    config: PeftConfig,
    module: str,
    tensors: Mapping[str, Tensor],
    places: HubPlaces,
    shared: Mapping[str, Tensor],
) -> Iterator[SitePart]:
    every = places.projections(module)
    sites = [site for site in every if site.steps[-1][0] in _matrices(config)] if len(every) > 1 else every
    if not sites:
        raise PeftcError(Diagnostic("P802", f"`{module}` is no Linear with a site"))
    is_scale = config.one_of("composition_mode", ("add", "scale"), "it is add or scale") == "scale"
    form, is_dora = form_of(config), config.flag("use_dora")
    if len(every) > 1 and (is_dora or form is not LORA):
        raise PeftcError(
            Diagnostic("P802", f"the library has LoRA and (IA)³ alone at `{module}`, whose parts it fuses")
        )
    _check_dora(config, form, is_scale)
    expected = {"lora_B"} if is_scale else {*form.tensors, *(("m.weight",) if is_dora else ())}
    if config.flag("use_gating"):
        expected |= set(GATE)
    if set(tensors) != expected or any(one.ndim == 0 or len(one) % len(sites) for one in tensors.values()):
        raise damaged(f"`{module}` has {', '.join(sorted(tensors))}, and {', '.join(sorted(expected))} are expected")
    for number, site in enumerate(sites):
        part = {end: one.chunk(len(sites))[number] for end, one in tensors.items()}
        if is_scale:
            yield _scaled(config, site, part, len(sites))
        elif is_dora:
            yield _normalized(config, form, site, part, shared)
        else:
            yield _added(config, form, site, part, shared)


def _check_dora(config: PeftConfig, form: LowRankForm, is_scale: bool) -> None:
    """Raises: P802 for what the library has no DoRA of."""
    if config.flag("use_dora") and (is_scale or form.change is None):
        raise refusal("use_dora", True, "the library has it of LoRA and VeRA alone")
    if config.flag("use_dora") and config.flag("use_gating"):
        raise refusal("use_dora", True, "there is no equation for it with `use_gating`")


def _matrices(config: PeftConfig) -> list[str]:
    value = config.read("attn_matrices", [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):  # pyright: ignore[reportUnknownVariableType]
        raise refusal("attn_matrices", value, "it is an array of q, k and v")
    return value  # pyright: ignore[reportUnknownVariableType]


def _added(
    config: PeftConfig, form: LowRankForm, site: Site, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> SitePart:
    """With a gate the library has no scale besides it."""
    braces, alpha, dropout = numbers(config, form, tensors, site.path), _alpha(config), config.number("dropout", 0.0)
    options = f", alpha={shown(alpha)}" if shown(alpha) != braces["r"] and "gate.weight" not in tensors else ""
    options += f", dropout={shown(dropout)}" if dropout else ""
    call = form.call.format(**braces, options=options)
    own = _own(form, call, tensors, shared)
    return SitePart("lora", site, (f"h += {_gate(tensors, own)}{call}",), own, (form.text,) if form.text else ())


def _normalized(
    config: PeftConfig, form: LowRankForm, site: Site, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> SitePart:
    """DoRA of the library scales all that the Linear writes, with the bias."""
    assert form.change is not None
    braces, (template, text) = numbers(config, form, tensors, site.path), form.change
    call, factor = template.format(**braces), _alpha(config) / float(braces["r"])
    equations = (
        f"let a = {call}",
        "let g = magnitude_ratio(w + a)",
        f"w += {'' if factor == 1 else f'{shown(factor)} * '}a",
        "h *= g",
    )
    own = _own(form, call, tensors, shared) | {"magnitude_ratio.m": tensors["m.weight"]}
    return SitePart("lora", site, equations, own, (*((text,) if text else ()), MAGNITUDE_RATIO))


def _own(
    form: LowRankForm, call: str, tensors: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """By `form.parameter`, also what all sites have in common. Raises: P803."""
    common = form.common or {}
    if lack := [end for end in common if end not in shared]:
        message = f"the adapter has no `{lack[0]}`, which all its Linears share: the library leaves it out of what it"
        help_ = "save it from a model with a head"
        raise PeftcError(Diagnostic("P803", f"{message} saves of a model without a head", help=help_))
    name = call.partition("(")[0]
    own = {f"{name}.{ours}": tensors[end] for end, ours in form.tensors.items()}
    return own | {f"{name}.{ours}": shared[end] for end, ours in common.items()}


def _alpha(config: PeftConfig) -> float:
    alpha = config.number("alpha", 8)
    if alpha <= 0:
        raise refusal("alpha", alpha, "it is above 0")
    return alpha


def _scaled(config: PeftConfig, site: Site, tensors: Mapping[str, Tensor], parts: int) -> SitePart:
    alpha = config.number("alpha", 1)
    if config.number("r", 1) != 1:
        raise refusal("r", config.values["r"], "a scale has the rank 1")
    if parts > 1 and alpha != 1 and "gate.weight" not in tensors:
        raise refusal("alpha", alpha, "the library scales the other parts of a fused Linear with it, too")
    factor = "" if alpha == 1 or "gate.weight" in tensors else f"{shown(alpha)} * "
    own = {"vector.scale": tensors["lora_B"]}
    gate = _gate(tensors, own).removesuffix(" * ")
    equations = (f"h *= {factor}vector(init=1)", *((f"h *= {gate}",) if gate else ()))
    return SitePart("ia3", site, equations, own)


def _gate(tensors: Mapping[str, Tensor], own: dict[str, Tensor]) -> str:
    if "gate.weight" not in tensors:
        return ""
    own |= {end: tensors[end] for end in GATE}
    return "gate(x) * "
