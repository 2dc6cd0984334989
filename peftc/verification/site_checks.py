"""Checks sites one by one: an edit perturbed alone, and the operands of an attention."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Site, Slice
from peftc.models.samples import copy_sample
from peftc.planning import ir
from peftc.verification.checks import CheckResults
from peftc.verification.comparison import CallResult, Comparison, unavailable_on_error
from peftc.verification.forward_modes import EVALUATION, WITH_GRADIENTS
from peftc.verification.reference.interpreter import features, with_features
from peftc.verification.reference.locations import Location, ReferenceUnavailable
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.reference.outputs import CallEvent, Recorder, first_difference, first_tensor, with_first_tensor
from peftc.verification.report import Finding

ROLES = {"q": "queries", "k": "keys", "v": "values"}
ALL = 0.99  # of the entries that must change; rounding may hide a few


def sample_of(site_edits: Sequence[ir.SiteEdit], all_sites: bool) -> list[ir.SiteEdit]:
    """All sites, or the first, a middle and the last where paths differ in numbers only."""
    if all_sites:
        return list(site_edits)
    kinds: dict[tuple[str, str], list[ir.SiteEdit]] = defaultdict(list)
    for site_edit in site_edits:
        kinds[site_edit.edit, re.sub(r"\[\d+\]", "[*]", site_edit.site.path)].append(site_edit)
    return [kind[i] for kind in kinds.values() for i in sorted({0, len(kind) // 2, len(kind) - 1})]


def check_perturbations(comparison: Comparison, all_sites: bool, results: CheckResults) -> None:
    """Perturbs each edit alone: the output must change, and nothing before its site."""
    name = "each edit alone moves the output, and nothing before it"
    with results.attempt(name, "P602"):
        findings = list(_perturb_each(comparison, all_sites, results))
        results.add(name, *findings, detail=f"{sum(results.perturbed.values())} sites")


def _perturb_each(comparison: Comparison, all_sites: bool, results: CheckResults) -> Iterator[Finding]:
    values = comparison.values()
    order, before = Recorder(), Recorder()
    reference = CallResult({}) if comparison.unavailable else comparison.run_reference(EVALUATION, order)
    original = comparison.run_compiled(EVALUATION, before)
    seen: set[tuple[str, ...]] = set()
    for site_edit in sample_of(comparison.record.site_edits, all_sites):
        names = tuple(comparison.parameters_of(site_edit))
        if not names or names in seen:
            continue
        seen.add(names)
        results.perturbed[site_edit.edit] += 1
        comparison.perturb(names, seed="alone")
        after = Recorder()
        outputs = comparison.run_compiled(EVALUATION, after).outputs
        is_inert = first_difference(original.outputs, outputs) is None
        if not comparison.unavailable:
            if is_inert:
                outputs = comparison.run_reference(EVALUATION).outputs
                is_inert = first_difference(reference.outputs, outputs) is None
                if not is_inert:
                    yield _finding(site_edit, "P604", "the parameters of an edit have no effect", 0.0)
            earlier = order.events_before(comparison.edits_sharing(site_edit, names))
            yield from _upstream_changes(site_edit, earlier, before, after)
        results.inert[site_edit.edit] += is_inert
        comparison.reset(values)


def _upstream_changes(
    site_edit: ir.SiteEdit, earlier: Sequence[CallEvent], before: Recorder, after: Recorder
) -> Iterator[Finding]:
    """The first module output before the site that is not the same, bit for bit."""
    for event in earlier:
        if event in before.events and event in after.events and event.kind == "output":
            difference = first_difference(before.events[event], after.events[event], 0)
            if difference is not None:
                message = f"an edit changes `{event.module}`, which is computed before its site"
                yield _finding(site_edit, "P605", message, difference.size, event.module)
                return


def _finding(site_edit: ir.SiteEdit, code: str, message: str, size: float, module: str | None = None) -> Finding:
    state = ", ".join(assign.state for assign in site_edit.assigns)
    site = site_edit.site.path
    return Finding(code=code, message=message, edit=site_edit.edit, site=site, state=state, module=module, size=size)


class _AllObserved(Exception):
    """Ends a call of the base once all operands are observed."""


def check_roles(comparison: Comparison, all_sites: bool, results: CheckResults) -> None:
    """Noise in the rows of `attn.q` must change all queries at the attention, no keys or values."""
    name = "attn.q, attn.k and attn.v are the operands of the attention"
    edits: dict[str, tuple[str, Site]] = {}
    for site_edit in sample_of(comparison.record.site_edits, all_sites):
        if site_edit.site.steps[-1][0] in ROLES:
            edits.setdefault(site_edit.site.path, (site_edit.edit, site_edit.site))
    findings: list[Finding] = []
    reasons: list[str] = []
    for edit, site in edits.values():
        try:
            findings += wrong_role(comparison, edit, site)
        except ReferenceUnavailable as reason:
            reasons.append(f"`{site.path}`: {reason}")
    if reasons and not findings:
        results.skip(name, f"{len(reasons)} of {len(edits)} sites not witnessed; {reasons[0]}")
    elif edits:
        results.add(name, *findings, detail=f"{len(edits)} sites")


def wrong_role(comparison: Comparison, edit: str, site: Site) -> list[Finding]:
    """The first operand that changes without reason, or does not change."""
    locator, own_role, owner = comparison.reference.locator, site.steps[-1][0], site.path.rpartition(".")[0]
    if owner not in locator.sites:
        raise ReferenceUnavailable(f"the base has no `{owner}`: module classes were changed after compilation")
    attention = locator.attention(locator.sites[owner], "query")
    before = attention_operands(comparison, attention)
    noisy = locator.location(site, "h"), locator.rows(site, "h")
    after = attention_operands(comparison, attention, noisy)
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
    comparison: Comparison, attention: Location, noisy: tuple[Location, Slice | None] | None = None
) -> dict[str, Tensor]:
    """The operands of an attention of the base, with noise in an output if one is named."""
    operands: dict[str, Tensor] = {}

    def observe(_: str, role: str, value: Tensor) -> None:
        operands[role] = value.detach().clone()
        if role == "v":
            raise _AllObserved

    def add_noise(_: nn.Module, args: Any, result: Any) -> Any:
        value = first_tensor(result)
        is_inside = noisy is not None and (noisy[0].root == noisy[0].module or reference.depth[noisy[0].root] > 0)
        if noisy is None or value is None or not is_inside:
            return result
        part = features(noisy[1], value)
        noise = torch.randn(part.shape, generator=torch.Generator().manual_seed(0)).to(part.device, part.dtype)
        return with_first_tensor(result, with_features(noisy[1], value, part + noise))

    base = comparison.base
    forms, sites = comparison.reference.interpreter.forms, comparison.reference.locator.sites
    reference = ReferenceModel(base, (), sites, forms, {})
    reference.watched[attention.owner] = attention
    reference.on_operand, reference.operations.identify_roles = observe, True
    with unavailable_on_error(), suppress(_AllObserved), ExitStack() as stack:
        stack.enter_context(WITH_GRADIENTS.applied_to(base))  # gradients of scores: parameters are frozen
        if noisy is not None:
            stack.callback(base.get_submodule(noisy[0].module).register_forward_hook(add_noise).remove)
        stack.enter_context(reference.active())
        base(**copy_sample(comparison.batch))
    return operands
