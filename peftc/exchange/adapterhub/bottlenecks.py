"""Bottleneck adapters of AdapterHub, sequential and parallel, and those with Kronecker products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.adapterhub.folder import HubAdapter
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.site_parts import SitePart
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import shown

# The configuration's key for each kind of sub-layer.
FLAGS = {"self": "mh_adapter", "cross": "cross_adapter", "ffn": "output_adapter"}
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
    "silu": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "leakyrelu": "leaky_relu",
    "linear": "none",
}
# The tensors of a bottleneck, but for the number of the projection behind a norm.
LINEAR = {
    "adapter_down.0.weight": "adapter.down",
    "adapter_down.0.bias": "adapter.down_bias",
    "adapter_up.weight": "adapter.up",
    "adapter_up.bias": "adapter.up_bias",
    "adapter_norm_before.weight": "adapter.norm_in_weight",
    "adapter_norm_before.bias": "adapter.norm_in_bias",
    "adapter_norm_after.weight": "adapter.norm_out_weight",
    "adapter_norm_after.bias": "adapter.norm_out_bias",
}
PHM = {
    "adapter_down.0.W_left": "phm.down_left",
    "adapter_down.0.W_right": "phm.down_right",
    "adapter_down.0.W": "phm.down_whole",
    "adapter_down.0.phm_rule": "phm.down_A",
    "adapter_down.0.b": "phm.down_bias",
    "adapter_up.W_left": "phm.up_left",
    "adapter_up.W_right": "phm.up_right",
    "adapter_up.W": "phm.up_whole",
    "adapter_up.phm_rule": "phm.up_A",
    "adapter_up.b": "phm.up_bias",
}
GATE = {"gate.weight": "gate.weight", "gate.bias": "gate.bias"}
# Of training alone, or of what the tensors tell.
_IGNORED = (
    *("mh_adapter", "output_adapter", "cross_adapter", "leave_out", "reduction_factor", "init_weights"),
    *("init_weights_seed", "phm_c_init", "phm_init_range", "learn_phm", "hypercomplex_nonlinearity", "phm_rank"),
    *("phm_bias", "phm_dim", "shared_phm_rule", "factorized_phm_W", "inv_adapter_reduction_factor", "inv_adapter"),
    *("adapter_residual_before_ln", "residual_before_ln", "original_ln_before", "original_ln_after"),
)
_STREAM = "the library adds the residual stream in another way than the model, for which there is no equation"


def is_bottleneck(config: PeftConfig) -> bool:
    return config.values.get("architecture") in (None, "bottleneck")


def bottlenecks(adapter: HubAdapter, places: HubPlaces) -> Iterator[SitePart]:
    """Raises: P802, P803, P804."""
    configs = [config for config in adapter.configs if is_bottleneck(config)]
    own, owners = defaultdict[str, dict[str, Tensor]](dict), dict[str, Site]()
    for one in adapter.of("adapters"):
        site = owners[one.owner] = owners.get(one.owner) or places.sublayer(one.owner)
        own[site.path][one.end] = one.value
    _check_complete(configs, places, own)
    shared = {one.end: one.value for one in adapter.of("shared_parameters")}
    for site in places.sublayers:
        if site.path in own:
            config = _config(configs, site, places)
            if config is None:
                raise damaged(f"the adapter has tensors of `{site.path}`, for which the configuration has none")
            yield _part(adapter, config, site, places, own[site.path], shared)
    for config in configs:
        config.finish(_IGNORED)


def _config(configs: list[PeftConfig], site: Site, places: HubPlaces) -> PeftConfig | None:
    """The first that is for a sub-layer. In some models `mh_adapter` is of cross-attentions."""
    number, kind = places.layer_number(site), site.steps[-1][0]
    for flag in (FLAGS[kind], *(["mh_adapter"] if kind == "cross" else [])):
        for config in configs:
            if config.flag(flag) and number not in leave_out(config):
                return config
    return None


def _check_complete(configs: list[PeftConfig], places: HubPlaces, own: Mapping[str, Any]) -> None:
    """Raises: P803 where tensors are missing, which the library would draw."""
    for site in places.sublayers:
        config = _config(configs, site, places) if site.steps[-1][0] != "cross" else None
        if config is not None and site.path not in own:
            raise damaged(f"the configuration is for `{site.path}`, too, and the adapter has no tensors of it")


def leave_out(config: PeftConfig) -> list[int]:
    value = config.read("leave_out", [])
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):  # pyright: ignore[reportUnknownVariableType]
        raise refusal("leave_out", value, "it is an array of numbers")
    return value  # pyright: ignore[reportUnknownVariableType]


def _part(
    adapter: HubAdapter,
    config: PeftConfig,
    site: Site,
    places: HubPlaces,
    tensors: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
) -> SitePart:
    _note_training(adapter, config)
    value, statement = reading(config, site, places)
    is_phm = config.flag("phm_layer")
    named = _named(tensors, site, {**(PHM if is_phm else LINEAR), **GATE, "scaling": "scaling"})
    gate = config.flag("use_gating")
    scale = _scale(config, named, site)
    if config.flag("ln_after") and (gate or scale):
        raise refusal("ln_after", True, "the norm stands behind the scale and the gate, for which there is no equation")
    call = _phm(config, named, shared, site) if is_phm else _adapter(config, named, site)
    if gate != ("gate.weight" in named):
        raise damaged(f"the configuration has `use_gating: {gate}`, and `{site.path}` disagrees")
    names = ["n"] if value == _NORMED and (gate or statement.count("{v}") > 1) else []
    read = names[0] if names else value
    product = f"{f'gate({read}) * ' if gate else ''}{scale}{call.format(v=read)}"
    equation = statement.format(v=read, a=product)
    return SitePart("bottleneck", site, (*(f"let {one} = {value}" for one in names), equation), named)


_NORMED = "norm(h + res)"


def reading(config: PeftConfig, site: Site, places: HubPlaces) -> tuple[str, str]:
    """What the bottleneck reads, and how its value `a` is added. Raises: P802."""
    before, after = config.flag("original_ln_before"), config.values.get("original_ln_after", True)
    residual = config.values.get("residual_before_ln", True)
    if "res" not in site.states or places.shares_residual(site):
        raise PeftcError(Diagnostic("P802", f"at `{site.path}` another sub-layer is added to the same residual stream"))
    behind = places.is_behind_norm(site)
    if config.flag("is_parallel"):
        if after is not True:
            raise refusal("original_ln_after", after, _STREAM)
        return "res", "h += {a}"
    if config.flag("adapter_residual_before_ln") and config.flag("ln_after"):
        raise refusal("adapter_residual_before_ln", True, "there is no equation for this norm of a sum")
    if before and not behind and residual is False and after is False:
        return "h + res", "h += {a}"
    if after is not True:
        raise refusal("original_ln_after", after, _STREAM)
    if not before:
        if residual not in (True, False):
            raise refusal("residual_before_ln", residual, "the library has no value for it without original_ln_before")
        return "h", "h += {a}"
    value = _NORMED if behind else "h + res"
    if residual is True:
        return value, "h += {a}"
    if residual is False:
        return value, "h = {v} + {a}"
    if residual == "post_add" and behind:
        return value, "h = h + res + {a}"
    raise refusal("residual_before_ln", residual, "the library has no value for it in this model")


def _scale(config: PeftConfig, named: dict[str, Tensor], site: Site) -> str:
    scaling, tensor = config.read("scaling", 1.0), named.pop("scaling", None)
    trained = {"learned": ("scalar", "scalar(init=1) * "), "channel": ("vector", "vector(init=1) * ")}.get(str(scaling))
    if (trained is not None) != (tensor is not None):
        raise damaged(f"the configuration has `scaling: {scaling}`, and `{site.path}` disagrees")
    if trained is not None and tensor is not None:
        named[f"{trained[0]}.scale"] = tensor
        return trained[1]
    number = config.number("scaling", 1.0)
    return "" if number == 1 else f"{shown(number)} * "


def _named(tensors: Mapping[str, Tensor], site: Site, names: Mapping[str, str]) -> dict[str, Tensor]:
    named = dict[str, Tensor]()
    for end, tensor in tensors.items():
        # Behind a norm the projection has the number 1, and the norm has the name 0, too.
        if "adapter_norm_before.weight" in tensors and end.startswith("adapter_down."):
            number, _, last = end.removeprefix("adapter_down.").partition(".")
            if number == "0":
                continue
            end = f"adapter_down.{int(number) - 1}.{last}" if number.isdigit() else end
        if end not in names:
            raise PeftcError(Diagnostic("P802", f"`{site.path}` has a tensor `{end}`, for which there is no equation"))
        named[names[end]] = tensor
    return named


def activation(config: PeftConfig) -> str:
    value = config.read("non_linearity", "relu")
    act = ACTIVATIONS.get(value.lower()) if isinstance(value, str) else None
    if act is None:
        raise refusal("non_linearity", value, f"forms have {', '.join(ACTIVATIONS)}")
    return act


def _adapter(config: PeftConfig, named: Mapping[str, Tensor], site: Site) -> str:
    missing = {"adapter.down", "adapter.down_bias", "adapter.up", "adapter.up_bias"} - set(named)
    if missing or named["adapter.down"].ndim != 2:
        raise damaged(f"`{site.path}` has no projections of a bottleneck")
    options = "".join(
        f", {option}=true"
        for key, option in (("ln_before", "norm_in"), ("ln_after", "norm_out"))
        if _agrees(config, key, f"adapter.{option}_weight" in named, site)
    )
    return f"adapter({{v}}, r={named['adapter.down'].shape[0]}, act={activation(config)}{options})"


def _agrees(config: PeftConfig, key: str, there: bool, site: Site) -> bool:
    if config.flag(key) != there:
        raise damaged(f"the configuration has `{key}: {config.flag(key)}`, and `{site.path}` disagrees")
    return there


def _phm(config: PeftConfig, named: dict[str, Tensor], shared: Mapping[str, Tensor], site: Site) -> str:
    for key in ("ln_before", "ln_after", "shared_W_phm", "factorized_phm_rule"):
        if config.flag(key):
            raise refusal(key, True, "there is no equation for it together with `phm_layer`")
    factorised, own = "phm.down_left" in named, "phm.down_A" in named
    first = named.get("phm.down_left" if factorised else "phm.down_whole")
    last = named.get("phm.down_right" if factorised else "phm.down_whole")
    if first is None or last is None or first.ndim != 3 or last.ndim != 3:
        raise damaged(f"`{site.path}` has no projections of a bottleneck")
    if not own:
        if "phm_rule" not in shared:
            message = (
                "the adapter has no `phm_rule`, which all its projections share: the library leaves it out of what"
            )
            help_ = "save it from a model with a head"
            raise PeftcError(Diagnostic("P803", f"{message} it saves of a model without a head", help=help_))
        named["phm.A"] = shared["phm_rule"]
    options = f", rank={first.shape[-1]}" if factorised else ", factorised=false"
    options += f"{'' if not own else ', shared=false'}, act={activation(config)}"
    options += "" if "phm.up_bias" in named else ", bias=false"
    return f"phm({{v}}, r={first.shape[0] * last.shape[-1]}, n={first.shape[0]}{options})"


def _note_training(adapter: HubAdapter, config: PeftConfig) -> None:
    """Dropout that stands elsewhere in our forms, which only training sees."""
    for key in ("dropout", "stochastic_depth"):
        value = config.number(key, 0.0)
        if value:
            adapter.notes[f"left out: {key}={shown(value)}, which acts while training alone"] = None
