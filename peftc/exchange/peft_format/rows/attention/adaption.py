"""Adaption prompts of PEFT: tokens that pass the projections of keys and values of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor, nn

from peftc.addressing.site_list import site_list
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import PREFIX, damaged
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors
from peftc.exchange.spec_text import ModulePart, unfit

FORM = """
# Trained tokens, whose keys and values the layer's own projections make, in an attention of their own, times a gate.
# Zhang et al. 2023, arXiv:2303.16199, section 3.2 (zero-initialised attention)
form adaption_prompt(
    q,
    w,  # the weights of the keys and of the values, one above the other
    len,  # tokens
) {
    let n = d_head(q)
    let groups = rows(w) / (2 * n)
    require rows(w) == 2 * n * groups
    param tokens[len, cols(w)] = normal
    param gate = 0
    fixed copies[1, heads(q) / groups, 1] = ones
    let both = w @ t(tokens)
    let keys = reshape(narrow(both, 0, groups * n), groups, 1, n * len)
    let values = reshape(narrow(both, groups * n, groups * n), groups, 1, n * len)
    let scores = t(reshape(copies * keys, heads(q), n, len)) @ q / sqrt(n)
    f = gate * reshape(copies * values, heads(q), n, len) @ softmax(scores)
}
"""
NAME = "adaption_prompt"
PROMPT, GATE = _ENDS = ("adaption_prompt", "adaption_gate")
EQUATION = f"h += {NAME}(q, weight(k, v), len={{len}})"


def _numbers(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    return {"len": config.whole("adapter_len", 1)}


def attentions(table: SiteTable) -> list[Site]:
    """The heads of the attentions of a model, in the order of its layers."""
    return [site for site in table.sites if site.steps_in_layer and site.steps[-1][0] == "heads"]


def reason_against(table: SiteTable, site: Site) -> str | None:
    """Why PEFT computes something else than the equation at an attention, or nothing."""
    sites, outer = site_list(table), site.path.rpartition(".")[0]
    for name in ("k", "v", "o"):
        one = sites.get(f"{outer}.{name}")
        if one is None or one.module != f"{site.module}.{name}_proj":
            return "PEFT has it of attentions whose Linears are `k_proj`, `v_proj` and `o_proj`"
        if "b" in one.states:
            return "PEFT adds the biases of the projections to what its tokens give, too"
    if sites.get(f"{outer}.q.norm") is not None:
        return "PEFT computes the queries without their norm"
    q = site.states["q"].shape
    if getattr(q, "heads", 0) * getattr(q, "d_head", 0) != table.d_model:
        return "PEFT takes the features of a head for those of the model, divided by the heads"
    return None


def _parts(config: PeftConfig, tensors: Tensors, table: SiteTable, model: nn.Module) -> list[ModulePart]:
    """Raises: P802, P803, P804."""
    own, numbers = defaultdict[str, dict[str, Tensor]](dict), _numbers(config, "", tensors)
    for key, tensor in tensors.items():
        module, _, end = key.removeprefix(PREFIX).rpartition(".")
        if end not in _ENDS:
            raise PeftcError(Diagnostic("P802", f"the adapter has a tensor `{key}`, for which there is no equation"))
        own[module][end] = tensor
    config.read("target_modules", None)
    if not (sites := attentions(table)):
        raise unfit("the model has no attentions with heads")
    for site in sites:
        if reason := reason_against(table, site):
            raise PeftcError(Diagnostic("P802", f"`{site.module}`: {reason}"))
    chosen = _last(sites, config.whole("adapter_layers", len(own)), own)
    parts = list[ModulePart]()
    for site in chosen:
        ends = own[site.module]
        if (
            set(ends) != set(_ENDS)
            or ends[PROMPT].shape != (1, numbers["len"], table.d_model)
            or ends[GATE].numel() != 1
        ):
            shapes = ", ".join(f"{end} {list(tensor.shape)}" for end, tensor in ends.items())
            raise damaged(f"`{site.module}` has {shapes}, and the configuration {numbers['len']} tokens")
        named = {f"{NAME}.tokens": ends[PROMPT][0], f"{NAME}.gate": ends[GATE]}
        parts.append(ModulePart(site.module, EQUATION.format(**numbers), named, "heads", FORM))
    return parts


def _last(sites: Sequence[Site], count: int, own: dict[str, dict[str, Tensor]]) -> Sequence[Site]:
    """The attentions of the last layers. Raises: P802, P804 where others have tensors."""
    if count > len(sites):
        raise refusal("adapter_layers", count, f"the model has {len(sites)} attentions")
    chosen = sites[len(sites) - count :]
    if {site.module for site in chosen} != set(own):
        raise unfit(f"the adapter has tensors of {', '.join(sorted(own)[:2])}, and not of the last {count} attentions")
    return chosen


ADAPTION_PROMPT = PeftType(
    (PeftRow({PROMPT: f"{NAME}.tokens", GATE: f"{NAME}.gate"}, EQUATION, FORM, config=lambda args: {}),),
    _numbers,
    sites=_parts,
    dimensions=3,
)
