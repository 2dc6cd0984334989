"""LoRA and (IA)³ of AdapterHub: at Linears, also at q, k and v of a fused one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

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
    for config in (one for one in adapter.configs if one.values.get("architecture") == "lora"):
        if not own:
            raise damaged("the configuration has LoRA, and the adapter has no tensors of it")
        if config.flag("use_dora"):
            raise refusal(
                "use_dora", True, "the library scales the bias with the weight, for which there is no equation"
            )
        for key in ("vera_d", "vera_b"):
            if config.read(key, None) is not None:
                raise refusal(key, config.values[key], "the library saves the frozen matrices of VeRA nowhere")
        for module, tensors in own.items():
            yield from _parts(config, module, tensors, places)
        config.finish(_IGNORED)


def _parts(config: PeftConfig, module: str, tensors: Mapping[str, Tensor], places: HubPlaces) -> Iterator[SitePart]:
    sites = places.projections(module)
    if len(sites) > 1:
        sites = [site for site in sites if site.steps[-1][0] in _matrices(config)]
    if not sites:
        raise PeftcError(Diagnostic("P802", f"`{module}` is no Linear with a site"))
    is_scale = config.one_of("composition_mode", ("add", "scale"), "it is add or scale") == "scale"
    expected = {"lora_B"} | (set() if is_scale else {"lora_A"})
    if config.flag("use_gating"):
        expected |= {"gate.weight", "gate.bias"}
    if set(tensors) != expected or any(one.ndim == 0 or len(one) % len(sites) for one in tensors.values()):
        raise damaged(f"`{module}` has {', '.join(sorted(tensors))}, and {', '.join(sorted(expected))} are expected")
    for number, site in enumerate(sites):
        part = {end: one.chunk(len(sites))[number] for end, one in tensors.items()}
        yield _scaled(config, site, part, len(sites)) if is_scale else _added(config, site, part)


def _matrices(config: PeftConfig) -> list[str]:
    value = config.read("attn_matrices", [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):  # pyright: ignore[reportUnknownVariableType]
        raise refusal("attn_matrices", value, "it is an array of q, k and v")
    return value  # pyright: ignore[reportUnknownVariableType]


def _added(config: PeftConfig, site: Site, tensors: Mapping[str, Tensor]) -> SitePart:
    """With a gate the library has no scale besides it."""
    rank, alpha, dropout = config.rank(site.path), config.number("alpha", 8), config.number("dropout", 0.0)
    if tensors["lora_A"].ndim != 2 or len(tensors["lora_A"]) != rank:
        raise damaged(f"`{site.path}` has A {list(tensors['lora_A'].shape)}, and the rank {rank} by the configuration")
    if alpha <= 0:
        raise refusal("alpha", alpha, "it is above 0")
    options = f", alpha={shown(alpha)}" if alpha != rank and "gate.weight" not in tensors else ""
    options += f", dropout={shown(dropout)}" if dropout else ""
    own = {"lora.A": tensors["lora_A"], "lora.B": tensors["lora_B"]}
    return SitePart("lora", site, (f"h += {_gate(tensors, own)}lora(x, r={rank}{options})",), own)


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
    own |= {"gate.weight": tensors["gate.weight"], "gate.bias": tensors["gate.bias"]}
    return "gate(x) * "
