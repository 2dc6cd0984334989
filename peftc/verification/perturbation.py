"""Perturbs each edit alone: the output must change, and nothing before its site."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from peftc.planning import ir
from peftc.verification.checks import CheckResults
from peftc.verification.comparison import CallResult, Comparison
from peftc.verification.forward_modes import EVALUATION
from peftc.verification.preparation import Batch
from peftc.verification.reference.outputs import first_difference
from peftc.verification.reference.recorder import Recorder
from peftc.verification.report import Finding


@dataclass
class PerturbationCounts:
    """By edit: the sites that were perturbed, and those of them without an effect."""

    perturbed: Counter[str] = field(default_factory=Counter[str])
    inert: Counter[str] = field(default_factory=Counter[str])


def sample_of(site_edits: Sequence[ir.SiteEdit], all_sites: bool) -> list[ir.SiteEdit]:
    """All sites, or the first, a middle and the last where paths differ in numbers only."""
    if all_sites:
        return list(site_edits)
    kinds: dict[tuple[str, str], list[ir.SiteEdit]] = defaultdict(list)
    for site_edit in site_edits:
        kinds[site_edit.edit, re.sub(r"\[\d+\]", "[*]", site_edit.site.path)].append(site_edit)
    return [kind[i] for kind in kinds.values() for i in sorted({0, len(kind) // 2, len(kind) - 1})]


def check_perturbations(
    comparison: Comparison, batch: Batch, all_sites: bool, results: CheckResults
) -> PerturbationCounts:
    counts, name = PerturbationCounts(), "each edit alone moves the output, and nothing before it"
    with results.attempt(name, "P602"):
        findings = list(_perturb_each(comparison, batch, all_sites, counts))
        if findings:
            results.fails(name, *findings)
        else:
            results.holds(name, f"{sum(counts.perturbed.values())} sites")
    return counts


def _perturb_each(
    comparison: Comparison, batch: Batch, all_sites: bool, counts: PerturbationCounts
) -> Iterator[Finding]:
    values = comparison.values()
    order, before = Recorder(), Recorder()
    reference = CallResult({}) if comparison.unavailable else comparison.run_reference(batch, EVALUATION, order)
    original = comparison.run_compiled(batch, EVALUATION, before)
    seen: set[tuple[str, ...]] = set()
    for site_edit in sample_of(comparison.record.site_edits, all_sites):
        names = tuple(comparison.parameters_of(site_edit))
        if not names or names in seen:
            continue
        seen.add(names)
        counts.perturbed[site_edit.edit] += 1
        comparison.perturb(names, seed="alone")
        after = Recorder()
        outputs = comparison.run_compiled(batch, EVALUATION, after).outputs
        has_effect = first_difference(original.outputs, outputs) is not None
        is_inert = not has_effect
        if not comparison.unavailable:
            if not has_effect:
                outputs = comparison.run_reference(batch, EVALUATION).outputs
                is_inert = first_difference(reference.outputs, outputs) is None
                if not is_inert:
                    yield _finding(site_edit, "P604", "the parameters of an edit have no effect", 0.0)
            yield from _upstream_changes(comparison, site_edit, names, order, before, after)
        counts.inert[site_edit.edit] += is_inert
        comparison.reset(values)


def _upstream_changes(
    comparison: Comparison,
    site_edit: ir.SiteEdit,
    names: Sequence[str],
    order: Recorder,
    before: Recorder,
    after: Recorder,
) -> Iterator[Finding]:
    """The first module output before the site that is not the same, bit for bit."""
    for event in order.events_before(comparison.edits_sharing(site_edit, names)):
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
