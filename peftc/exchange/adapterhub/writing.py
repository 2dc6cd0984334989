"""Bottleneck adapters in the format of AdapterHub's library."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from peftc.addressing.sites import Site
from peftc.exchange.adapterhub.bottlenecks import ACTIVATIONS, FLAGS, LINEAR
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.edited_model import Base
from peftc.exchange.lora_export import no_form
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.planning.ir import SiteEdit
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

NAME = "peftc"
VERSION = "adapters.1.3.0"  # whose meaning of the keys this is
# What a bottleneck reads, by the position of the norm that the layer has behind the sum.
_READS: dict[str, tuple[bool | None, dict[str, Any]]] = {
    "h": (None, {"original_ln_before": False, "is_parallel": False}),
    "norm(h + res)": (True, {"original_ln_before": True, "is_parallel": False}),
    "h + res": (False, {"original_ln_before": True, "is_parallel": False}),
    "res": (None, {"original_ln_before": False, "is_parallel": True}),
}
_TRAINED = {"scalar": "learned", "vector": "channel"}


def hub_export(base: Base) -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
    """The configuration, the tensors, and the paths of the sites. Raises: P801."""
    folding = Folding(base.module, None, None, None)
    record, places = folding.record, HubPlaces(folding.analysis.table, base.module)
    if record.trained:
        edit = next(iter(record.trained)).partition("/")[0]
        raise no_form(edit, "the library has parameters of the base in heads alone")
    _check_names(folding.names[0] if folding.names else "it", places)
    config, tensors, sites = dict[str, Any](), dict[str, Tensor](), dict[str, Site]()
    for site_edit in record.site_edits:
        site = site_edit.site
        if site.path in sites:
            raise no_form(
                site_edit.edit, f"`{site.path}` has an edit already, and the library has one bottleneck there"
            )
        own, named = _bottleneck(site_edit, folding, places)
        if config not in ({}, own):
            raise no_form(site_edit.edit, f"the library has one of each for all sites, and `{site.path}` has {own}")
        config, sites[site.path] = own, site
        owner = places.owner(site)
        tensors |= {f"{owner}.adapters.{NAME}.{end}": tensor for end, tensor in named.items()}
    if not sites:
        raise no_form("it", "AdapterHub gets bottlenecks: `h += adapter(…)` at attentions and ffns")
    config |= _layers(record.site_edits[0].edit, list(sites.values()), places)
    settings: Any = base.module.config
    whole = {
        "config": config,
        "hidden_size": getattr(settings, "hidden_size", None),
        "model_class": base_class(base.module).__name__,
        "model_name": base.id,
        "model_type": settings.model_type,
        "name": NAME,
        "version": VERSION,
    }
    return whole, tensors, list(sites)


def _check_names(edit: str, places: HubPlaces) -> None:
    """Raises: P801 for models in which the library has other names than those of their modules."""
    if not any(site.steps[-1][0] == "embed" for site in places.sites.values()):
        raise no_form(edit, "the library names the modules of models for images otherwise")
    for site in places.sublayers:
        if site.runs > 1 or site.shared_with:
            raise no_form(edit, f"`{site.path}` is of a layer that runs several times")
        if (
            site.steps[-1][0] == "cross"
            and places.is_behind_norm(site)
            and not places.owner(site).endswith("_adapters")
        ):
            raise no_form(edit, f"the library does not tell `{site.path}` from the attention beside it")


def _bottleneck(site_edit: SiteEdit, folding: Folding, places: HubPlaces) -> tuple[dict[str, Any], dict[str, Tensor]]:
    edit, site, equation = site_edit.edit, site_edit.site, site_edit.assigns[0].source
    if site.path not in {one.path for one in places.sublayers} or len(site_edit.assigns) != 1 or site_edit.lets:
        raise no_form(edit, f"AdapterHub has nothing like it at `{site.path}`")
    if any(one.tasks or one.owner is not None for one in site_edit.instances):
        raise no_form(edit, "it has parameters for each task, or some that sites share")
    scaling, call = _scaling(equation)
    if (equation.target, equation.op) != ("h", "+=") or not isinstance(call, ast.Call) or call.function != "adapter":
        raise no_form(edit, "it is not `h += adapter(…)`, with a number, `scalar` or `vector` before it")
    behind = places.is_behind_norm(site)
    chosen = next((own for text, own in _READS.items() if call.args and _value(text) == call.args[0]), None)
    if chosen is None or chosen[0] not in (None, behind) or places.shares_residual(site):
        raise no_form(
            edit, "the library's bottlenecks read `h`, `res`, or the sum behind them as the model computes it"
        )
    modules, instance = folding.modules(site_edit), next(one for one in site_edit.instances if one.key == "adapter")
    args = instance.form.fill(instance.args)
    act = next((name for name, own in ACTIVATIONS.items() if own == args["act"]), None)
    if act is None or args["dropout"] or not args["bias"] or (args["norm_out"] and scaling != 1.0) or args["norm_in"]:
        raise no_form(edit, "the library has other activations, its biases, and dropout and norms in other places")
    named = {end: parameter for end, name in LINEAR.items() if (parameter := _parameter(modules, name)) is not None}
    form = next((key for key in _TRAINED if _TRAINED[key] == scaling), None)
    if form is not None:
        named["scaling"] = modules[form].get_parameter("scale").detach()
    width = len(named["adapter_down.0.weight"])
    features = int(named["adapter_up.weight"].shape[0])
    factor = features // width if features % width == 0 else features / width
    if int(features // factor) != width:
        raise no_form(edit, f"no `reduction_factor` gives the width {width}")
    own = {"reduction_factor": factor, "non_linearity": act, "scaling": scaling, "ln_after": args["norm_out"]}
    return {**own, **chosen[1], "residual_before_ln": True, "original_ln_after": True, "ln_before": False}, named


def _parameter(modules: Any, name: str) -> Tensor | None:
    form, _, attribute = name.partition(".")
    parameters = dict(modules[form].named_parameters())
    return parameters[attribute].detach() if attribute in parameters else None


def _scaling(equation: ast.Equation) -> tuple[float | str, ast.Expr]:
    value = equation.value
    if isinstance(value, ast.Binary) and value.op == "*":
        if isinstance(value.left, ast.Number):
            return float(value.left.value), value.right
        if isinstance(value.left, ast.Call) and value.left.function in _TRAINED:
            return _TRAINED[value.left.function], value.right
    return 1.0, value


def _layers(edit: str, sites: list[Site], places: HubPlaces) -> dict[str, Any]:
    """Which sub-layers have a bottleneck, in all layers but some. Raises: P801."""
    kinds = {site.steps[-1][0] for site in sites}
    expected = [site for site in places.sublayers if site.steps[-1][0] in kinds]
    present = {places.layer_number(site) for site in sites}
    paths = {site.path for site in sites}
    for site in expected:
        if places.layer_number(site) in present and site.path not in paths:
            raise no_form(edit, f"the library has bottlenecks at `{site.path}`, too, if at any in this layer")
    left = sorted({places.layer_number(site) for site in expected} - present)
    return {**{flag: kind in kinds for kind, flag in FLAGS.items()}, "leave_out": left}


@cache
def _value(text: str) -> ast.Expr:
    (edit,) = parse_text(f"peft 2\nedit e at layer[*] {{ h = {text} }}\n").statements
    assert isinstance(edit, ast.Edit)
    (equation,) = edit.body
    assert isinstance(equation, ast.Equation)
    return equation.value
