"""Edits of attentions in types of PEFT that have no modules of their own."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from peftc.equation_code.module import EquationModule, tensor_named
from peftc.exchange.lora_export import no_form
from peftc.exchange.peft_format.folder import PREFIX
from peftc.exchange.peft_format.form_texts import equation_of, is_form, is_same
from peftc.exchange.peft_format.rows.attention import adaption
from peftc.exchange.peft_format.rows.attention.cached import (
    CACHED,
    PREFIX_FORM,
    SINK,
    SINK_FORM,
    TASK,
    attentions,
    cached_config,
    pool_of,
    positions_refusal,
)
from peftc.exchange.peft_format.rows.prompts import PROMPT
from peftc.exchange.peft_format.task_types import task_type
from peftc.exchange.peft_format.types import TypedAdapter
from peftc.folding.own_forward import base_class
from peftc.folding.weights import Folding
from peftc.planning.ir import SiteEdit
from peftc.syntax import ast


def attention_adapter(folding: Folding) -> TypedAdapter | None:
    """Prefixes, cartridges and prompts of LLaMA-Adapter; None for other edits. Raises: P801."""
    site_edits = folding.record.site_edits
    if all(map(_joins_cached_rows, site_edits)):
        return cached_adapter(folding)
    return adaption_adapter(folding) if all(map(_adds_adaption, site_edits)) else None


def cached_adapter(folding: Folding) -> TypedAdapter:
    """Rows before the keys and values of all attentions, which positions count. Raises: P801."""
    edits = {edit.site.path: edit for edit in folding.record.site_edits}
    name, cls = next(iter(edits.values())).edit, base_class(folding.model)
    sites = [site.path for site in attentions(folding.analysis.table)]
    if set(sites) != set(edits) or len(edits) != len(folding.record.site_edits):
        raise no_form(name, f"PEFT has rows at all attentions alike, as at `{next(iter(sites))}`")
    if task_type(cls, ()) != TASK:
        raise no_form(name, f"PEFT reads the result of a {cls.__name__} at another place")
    if reason := positions_refusal(folding.model):
        raise no_form(name, reason)
    rows, frozen = list[tuple[Tensor, Tensor]](), list[int]()
    for path in sites:
        forms = [form.owner_module or form for form in folding.modules(edits[path]).values()]
        own = [tuple(tensor_named(cast(EquationModule, form), name) for name in ("key", "value")) for form in forms]
        rows.append((torch.cat([key for key, _ in own], 1), torch.cat([value for _, value in own], 1)))
        frozen.append(own[0][0].shape[1] if forms[0].definition.name == SINK else 0)
    if len({(*key.shape, *value.shape, sink) for (key, value), sink in zip(rows, frozen, strict=True)}) > 1:
        raise no_form(name, "PEFT has as many rows, of one size, at all attentions")
    if rows[0][0].shape != rows[0][1].shape:
        raise no_form(name, "PEFT has keys and values of one size")
    has_sink = any(one.form.name == SINK for one in edits[sites[0]].instances)
    config = cached_config(rows[0][0].shape[1], frozen[0] if has_sink else None)
    adapter = TypedAdapter(config["peft_type"], config, {PROMPT: pool_of(rows).detach()})
    adapter.modules += [edit.site.module for edit in edits.values()]
    if not torch.equal(adapter.tensors[PROMPT].float().to(rows[0][0].dtype), adapter.tensors[PROMPT]):
        adapter.notes.append("PEFT keeps the rows of a prefix in float32, which rounds them")
    return adapter


def _joins_cached_rows(site_edit: SiteEdit) -> bool:
    """Whether an edit is `kv = concat(cached_sink(…), cached_prefix(…), kv)`, or of one of them."""
    texts, forms = {SINK: SINK_FORM, CACHED: PREFIX_FORM}, site_edit.instances
    names = [one.form.name for one in forms]
    if len(site_edit.assigns) != 1 or names not in ([SINK, CACHED], [CACHED], [SINK]):
        return False
    calls = tuple(ast.Call(name, ()) for name in names)
    source = site_edit.assigns[0].source
    own = ast.Equation("kv", "=", ast.Call("concat", (*calls, ast.Name("kv"))))
    return is_same(own, source) and all(is_form(texts[one.form.name], one.form) and not one.tasks for one in forms)


def adaption_adapter(folding: Folding) -> TypedAdapter:
    """Prompts of LLaMA-Adapter at the last attentions. Raises: P801."""
    edits, table = {edit.site.path: edit for edit in folding.record.site_edits}, folding.analysis.table
    name, every = next(iter(edits.values())).edit, adaption.attentions(table)
    sites = every[len(every) - len(edits) :]
    if {site.path for site in sites} != set(edits) or len(edits) != len(folding.record.site_edits):
        raise no_form(name, f"PEFT has it at the last attentions, here those from `{sites[0].path}` on, once each")
    adapter = TypedAdapter("ADAPTION_PROMPT", {"peft_type": "ADAPTION_PROMPT", "adapter_layers": len(sites)})
    for site in sites:
        if reason := adaption.reason_against(table, site):
            raise no_form(name, f"`{site.module}`: {reason}")
        (form,) = folding.modules(edits[site.path]).values()
        tokens, gate = (form.get_parameter(one).detach() for one in ("tokens", "gate"))
        if adapter.config.setdefault("adapter_len", len(tokens)) != len(tokens):
            raise no_form(name, "PEFT has as many tokens at all attentions")
        adapter.modules.append(site.module)
        ends = {adaption.PROMPT: tokens[None], adaption.GATE: gate.reshape(1)}
        adapter.tensors |= {f"{PREFIX}{site.module}.{end}": tensor.contiguous() for end, tensor in ends.items()}
    adapter.config["target_modules"] = sites[0].module.rpartition(".")[2]
    return adapter


def _adds_adaption(site_edit: SiteEdit) -> bool:
    """Whether an edit is `h += adaption_prompt(q, weight(k, v), …)`."""
    if len(site_edit.assigns) != 1 or [one.form.name for one in site_edit.instances] != [adaption.NAME]:
        return False
    (one,), own = site_edit.instances, equation_of(adaption.EQUATION)
    is_own = is_same(own, site_edit.assigns[0].source) and is_form(adaption.FORM, one.form)
    return is_own and not one.tasks and one.owner is None and site_edit.site.steps[-1][0] == "heads"
