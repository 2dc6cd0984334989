"""Checks queries, keys and values at the attention.

Noise in the rows of `attn.q` must change all queries that reach the attention, and no keys or
values; likewise for `attn.k` and `attn.v`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Site, Slice
from peftc.verification.checks import CheckResults
from peftc.verification.comparison import Comparison, unavailable_on_error
from peftc.verification.forward_modes import WITH_GRADIENTS
from peftc.verification.perturbation import sample_of
from peftc.verification.preparation import Batch
from peftc.verification.reference.interpreter import features, with_features
from peftc.verification.reference.locations import Location, ReferenceUnavailable
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.reference.outputs import first_tensor, with_first_tensor
from peftc.verification.report import Finding

ROLES = {"q": "queries", "k": "keys", "v": "values"}
ALL = 0.99  # of the entries that must change; rounding may hide a few


class _AllObserved(Exception):
    """Ends a call of the base once all operands are observed."""


def check_roles(comparison: Comparison, batch: Batch, all_sites: bool, results: CheckResults) -> None:
    name = "attn.q, attn.k and attn.v are the operands of the attention"
    edits: dict[str, tuple[str, Site]] = {}
    for site_edit in sample_of(comparison.record.site_edits, all_sites):
        if site_edit.site.steps[-1][0] in ROLES:
            edits.setdefault(site_edit.site.path, (site_edit.edit, site_edit.site))
    findings: list[Finding] = []
    reasons: list[str] = []
    for edit, site in edits.values():
        try:
            findings += wrong_role(comparison, batch, edit, site)
        except ReferenceUnavailable as reason:
            reasons.append(f"`{site.path}`: {reason}")
    if findings:
        results.fails(name, *findings)
    elif reasons:
        results.skip(name, f"{len(reasons)} of {len(edits)} sites not witnessed; {reasons[0]}")
    elif edits:
        results.holds(name, f"{len(edits)} sites")


def wrong_role(comparison: Comparison, batch: Batch, edit: str, site: Site) -> list[Finding]:
    """The first operand that changes without reason, or does not change."""
    locator, own_role, owner = comparison.reference.locator, site.steps[-1][0], site.path.rpartition(".")[0]
    if owner not in locator.sites:
        raise ReferenceUnavailable(f"the base has no `{owner}`: module classes were changed after compilation")
    attention = locator.attention(locator.sites[owner], "query")
    before = attention_operands(comparison, batch, attention)
    noisy = locator.location(site, "h"), locator.rows(site, "h")
    after = attention_operands(comparison, batch, attention, noisy)
    if before.keys() != set(ROLES) or after.keys() != set(ROLES):
        raise ReferenceUnavailable("no attention was observed that uses its queries")
    for role, operand in ROLES.items():
        changed = (before[role] != after[role]).double().mean().item()
        if role == own_role and changed < ALL:
            message = f"a change of `{site.path}` reaches {changed:.0%} of the {operand} at the attention"
        elif role != own_role and changed:
            message = f"a change of `{site.path}` changes the {operand} at the attention"
        else:
            continue
        location: dict[str, str] = {"edit": edit, "site": site.path, "module": site.module}
        return [Finding(code="P606", message=message, state=role, size=changed, **location)]
    return []


def attention_operands(
    comparison: Comparison, batch: Batch, attention: Location, noisy: tuple[Location, Slice | None] | None = None
) -> dict[str, Tensor]:
    """The operands of an attention of the base, with noise in an output if one is named."""
    operands: dict[str, Tensor] = {}

    def observe(_: str, role: str, value: Tensor) -> None:
        operands[role] = value.detach().clone()
        if role == "v":
            raise _AllObserved

    forms, sites = comparison.reference.interpreter.forms, comparison.reference.locator.sites
    reference = ReferenceModel(comparison.base, (), sites, forms, {})
    reference.watched[attention.owner] = attention
    reference.on_operand, reference.operations.identify_roles = observe, True
    with unavailable_on_error(), suppress(_AllObserved), ExitStack() as stack:
        stack.enter_context(WITH_GRADIENTS.applied_to(comparison.base))  # gradients of scores: parameters are frozen
        if noisy is not None:
            hook = _noise_hook(reference, *noisy)
            stack.callback(comparison.base.get_submodule(noisy[0].module).register_forward_hook(hook).remove)
        stack.enter_context(reference.active())
        comparison.base(**batch)
    return operands


def _noise_hook(reference: ReferenceModel, location: Location, rows: Slice | None) -> Callable[..., Any]:
    def add_noise(_: nn.Module, args: Any, result: Any) -> Any:
        value = first_tensor(result)
        if not reference.depth[location.root] or value is None:
            return result
        part = features(rows, value)
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part.device, part.dtype)
        return with_first_tensor(result, with_features(rows, value, part + noise))

    return add_noise
