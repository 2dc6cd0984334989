"""Each edit alone: its parameters move the output, and nothing that is computed before its site."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from peftc.planning import ir
from peftc.verification.batches import Batch
from peftc.verification.checks import Results
from peftc.verification.report import Finding
from peftc.verification.trial import EVALUATION, Run, Trial
from peftc.verification.witness.outputs import difference
from peftc.verification.witness.recorder import Event, Recorder


@dataclass
class Moved:
    """By edit: how many sites were perturbed, and at how many of them the parameters change nothing at present."""

    perturbed: Counter[str] = field(default_factory=Counter[str])
    inert: Counter[str] = field(default_factory=Counter[str])


def sampled(placed: Sequence[ir.SiteEdit], everywhere: bool) -> list[ir.SiteEdit]:
    """The first, a middle and the last site of each kind, or all: sites are of one kind where only numbers in their paths differ."""
    kinds: dict[tuple[str, str], list[ir.SiteEdit]] = defaultdict(list)
    for one in placed:
        kinds[one.edit, re.sub(r"\[\d+\]", "[*]", one.site.path)].append(one)
    if everywhere:
        return list(placed)
    return [same[i] for same in kinds.values() for i in sorted({0, len(same) // 2, len(same) - 1})]


def check_movement(trial: Trial, batch: Batch, everywhere: bool, done: Results) -> Moved:
    """Perturbs the sample one by one, the other parameters as they are. Where nothing moves, the equations tell whether it should."""
    found, name = Moved(), "each edit alone moves the output, and nothing before it"
    with done.attempt(name, "P602"):
        failures = list(perturbed(trial, batch, everywhere, found))
        if failures:
            done.fails(name, *failures)
        else:
            done.holds(name, f"{sum(found.perturbed.values())} sites")
    return found


def perturbed(trial: Trial, batch: Batch, everywhere: bool, found: Moved) -> Iterator[Finding]:
    """What is wrong with the sites of the sample, each perturbed alone; they are counted in `found`."""
    before, recorder = Recorder(), Recorder()
    base = trial.values()
    order = Recorder()
    still = Run({}) if trial.unreached else trial.expected(batch, EVALUATION, order)
    plain = trial.compiled(batch, EVALUATION, before)
    seen: set[tuple[str, ...]] = set()
    for placed in sampled(trial.record.site_edits, everywhere):
        names = tuple(trial.parameters_of(placed))
        if not names or names in seen:
            continue
        seen.add(names)
        found.perturbed[placed.edit] += 1
        trial.perturb(names, seed="alone")
        recorder = Recorder()
        now = trial.compiled(batch, EVALUATION, recorder)
        moves = difference(plain.outputs, now.outputs) is not None
        if trial.unreached:
            found.inert[placed.edit] += not moves
        else:
            wanted = moves or difference(still.outputs, trial.expected(batch, EVALUATION).outputs) is not None
            found.inert[placed.edit] += not wanted
            yield from _without_effect(placed) if wanted and not moves else []
            yield from _upstream(trial, placed, names, order, before, recorder)
        trial.reset(base)


def _without_effect(placed: ir.SiteEdit) -> list[Finding]:
    state = ", ".join(assign.state for assign in placed.assigns)
    message = "the parameters of an edit have no effect"
    return [Finding(code="P604", message=message, edit=placed.edit, site=placed.site.path, state=state, size=0.0)]


def _upstream(
    trial: Trial, placed: ir.SiteEdit, names: Sequence[str], order: Recorder, before: Recorder, now: Recorder
) -> list[Finding]:
    """What has been computed before the site is the same, bit for bit."""
    for event in order.before(trial.sharing(placed, names)):
        if event in before.events and event in now.events and event.kind == "output":
            changed = difference(before.events[event], now.events[event], 0)
            if changed is not None:
                return [_finding(placed, event, changed.size)]
    return []


def _finding(placed: ir.SiteEdit, event: Event, size: float) -> Finding:
    message = f"an edit changes `{event.module}`, which is computed before its site"
    state = ", ".join(assign.state for assign in placed.assigns)
    return Finding(
        code="P605",
        message=message,
        edit=placed.edit,
        site=placed.site.path,
        state=state,
        module=event.module,
        size=size,
    )
