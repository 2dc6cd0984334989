"""An adapter in the format of AdapterHub's library.

The writers propose a configuration and tensors. The reader says what these are as equations: they
leave only if these are the edits, with the same tensors. So each rule of the format stands once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftc.addressing.sites import Site
from peftc.diagnostics import PeftcError
from peftc.exchange.adapterhub.edit_parts import NAME, EditPart, Written, edit_parts
from peftc.exchange.adapterhub.folder import HubAdapter, hub_adapter
from peftc.exchange.adapterhub.invertible import KIND as INVERTIBLE
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.reading import read_parts
from peftc.exchange.adapterhub.site_parts import SitePart, form_texts, site_edits_of
from peftc.exchange.adapterhub.terms import text
from peftc.exchange.adapterhub.writers import bottlenecks, interventions, invertible, low_rank, prefixes
from peftc.exchange.edited_model import Base
from peftc.exchange.lora_export import no_form
from peftc.exchange.selector_text import Selectors
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.planning.ir import SiteEdit
from peftc.planning.planner import make_plan
from peftc.recognition.analysis import Analysis
from peftc.semantics import expand
from peftc.syntax.parser import parse_text

VERSION = "adapters.1.3.0"  # whose meaning of the keys this is
_PROMPT = (
    "the library's prompt stands behind the norm and the positions of the embeddings, and counts as tokens of the text"
)


@dataclass(frozen=True, eq=False)
class HubExport:
    """`config`: what adapter_config.json has; `heads`: the tensors beside the base model's own."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    heads: dict[str, Tensor]
    sites: list[str]
    type: str


def hub_export(base: Base) -> HubExport:
    """Raises: P801."""
    folding = Folding(base.module, None, None, None)
    analysis, record = folding.analysis, folding.record
    places, parts = HubPlaces(analysis, base.module), edit_parts(base.module, record)
    if not parts:
        raise no_form(", ".join(folding.names) or "it", "the library has no adapters that train the base alone")
    _check_names(parts[0].edit, places)
    written, kinds = _written(parts, places)
    configs = [one.config for one in written]
    settings: Any = base.module.config
    whole = {
        "config": configs[0] if len(configs) == 1 else {"architecture": "union", "configs": configs},
        "hidden_size": getattr(settings, "hidden_size", None),
        "model_class": base_class(base.module).__name__,
        "model_name": base.id,
        "model_type": settings.model_type,
        "name": NAME,
        "version": VERSION,
    }
    tensors = {name: tensor for one in written for name, tensor in one.tensors.items()}
    heads = _heads(base, record.trained, places)
    _check_reading(hub_adapter(whole, tensors, heads), parts, analysis, base)
    sites = list(dict.fromkeys(part.site.path for part in parts))
    return HubExport(whole, tensors, heads, sites, kinds[0] if len(configs) == 1 else "union")


def _written(parts: Sequence[EditPart], places: HubPlaces) -> tuple[list[Written], list[str]]:
    own: dict[str, list[EditPart]] = {"prefix_tuning": [], "bottleneck": [], "lora": [], "reft": [], INVERTIBLE: []}
    paths = Counter[tuple[str, str]]()
    for part in parts:
        kind = _kind(part)
        paths[kind, part.site.path] += 1
        if paths[kind, part.site.path] > 1:
            raise part.no_form(f"`{part.site.path}` has another edit, and the library has one of a kind there")
        own[kind].append(part)
    written = [prefixes.write_prefixes(own["prefix_tuning"], places)] if own["prefix_tuning"] else []
    written += bottlenecks.write_bottlenecks(own["bottleneck"], places)
    written += [low_rank.write_low_rank(own["lora"], places)] if own["lora"] else []
    written += [interventions.write_interventions(own["reft"], places)] if own["reft"] else []
    invertible.add_invertible(own.pop(INVERTIBLE), written, places)
    return written, [kind for kind, members in own.items() if members]


def _kind(part: EditPart) -> str:
    if part.forms & prefixes.FORMS:
        return "prefix_tuning"
    if part.forms & bottlenecks.FORMS:
        return "bottleneck"
    if part.forms & low_rank.FORMS:
        return "lora"
    if part.forms & interventions.FORMS:
        return "reft"
    if part.forms & invertible.FORMS:
        return INVERTIBLE
    if "prompt" in part.forms:
        raise part.no_form(_PROMPT)
    raise part.no_form("AdapterHub has bottlenecks, Compacter, prefixes, LoRA, VeRA, DoRA, MTL-LoRA, (IA)³ and ReFT")


def _check_names(edit: str, places: HubPlaces) -> None:
    """Raises: P801 for models in which the library has other names than those of their modules."""
    if not any(site.steps[-1][0] == "embed" for site in places.sites.values()):
        raise no_form(edit, "the library names the modules of models for images otherwise")
    for site in places.sublayers:
        if site.runs > 1 or site.shared_with:
            raise no_form(edit, f"`{site.path}` is of a layer that runs several times")
        if _is_beside_another(site, places):
            raise no_form(edit, f"the library does not tell `{site.path}` from the attention beside it")


def _is_beside_another(site: Site, places: HubPlaces) -> bool:
    is_cross = site.steps[-1][0] == "cross"
    return is_cross and places.is_behind_norm(site) and not places.owner(site).endswith("_adapters")


def _heads(base: Base, trained: Mapping[str, str], places: HubPlaces) -> dict[str, Tensor]:
    """All parameters beside the base model, if `train` statements change some. Raises: P801."""
    inside = f"{places.prefix}."
    for saved, name in trained.items():
        if places.prefix not in places.modules or name.startswith(inside):
            edit = saved.partition("/")[0]
            raise no_form(edit, f"`{name}` is of the base, of which the library has parameters in heads alone")
    names = {n: p for n, p in base.module.named_parameters() if not n.startswith(inside) and "peftc" not in n}
    if not trained:
        return {}
    with base.values(list(names)):
        return {name: parameter.detach().clone() for name, parameter in names.items()}


def _check_reading(adapter: HubAdapter, parts: Sequence[EditPart], analysis: Analysis, base: Base) -> None:
    """Raises: P801 where the library would compute something else than the edits."""
    edit = parts[0].edit
    try:
        read = site_edits_of(read_parts(adapter, analysis, base.module).parts, Selectors(analysis.table))
        statements = "\n".join([*form_texts(read), *(one.text for one in read)])
        planned = make_plan(expand(parse_text(f"peft 2\n{statements}\n"), include=None), analysis.table)
    except PeftcError as error:
        raise no_form(edit, error.diagnostics[0].message) from error
    theirs = {one.name: one.parts for one in read}
    left = [(site_edit, theirs[site_edit.edit][site_edit.site.path]) for site_edit in planned.site_edits]
    for part in parts:
        same = next((one for one in left if one[0].site.path == part.site.path and _is_same(one, part)), None)
        if same is None:
            reason = "the library computes something else there"
            others = [one.equations for site_edit, one in left if site_edit.site.path == part.site.path]
            raise part.no_form(f"{reason}, `{'`, `'.join(others[0])}`" if others else reason)
        left.remove(same)
    if left:
        raise no_form(edit, f"the library would change `{left[0][0].site.path}`, too")


def _is_same(theirs: tuple[SiteEdit, SitePart], part: EditPart) -> bool:
    """Whether equations and tensors are the same, bit for bit."""
    site_edit, read = theirs
    if _shape(site_edit) != _shape(part.site_edit) or part.tensors.keys() != read.tensors.keys():
        return False
    pairs = ((read.tensors[name], tensor) for name, tensor in part.tensors.items())
    return all(one.dtype == two.dtype and torch.equal(one.reshape(two.shape), two) for one, two in pairs)


def _shape(site_edit: SiteEdit) -> tuple[object, ...]:
    """The equations of an edit, and which of its parameters are those of other sites, too."""
    instances = [(one.form.name, one.owner is None, one.index, one.dims.sites) for one in site_edit.instances]
    return [(one.state, text(one.value)) for one in site_edit.assigns], sorted(instances)
