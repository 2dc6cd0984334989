"""The properties of a compiled model as a whole: equal to the spec in every way of calling, and to the base without its edits."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.folding import fold
from peftc.installation.disable import disabled
from peftc.models.configs import error_summary
from peftc.planning import ir
from peftc.verification.batches import Batch
from peftc.verification.report import Check, Finding
from peftc.verification.trial import (
    EVALUATION,
    INFERENCE,
    TRAINING,
    WITH_DROPOUT,
    WITH_GRADIENTS,
    Broken,
    Mode,
    Run,
    Trial,
    passes,
)
from peftc.verification.witness.determinism import training
from peftc.verification.witness.hooks import Place
from peftc.verification.witness.locations import Unreachable
from peftc.verification.witness.outputs import GRADIENT, Difference, difference, results
from peftc.verification.witness.recorder import Recorder, first_difference, first_output


@dataclass
class Results:
    """What has been checked so far."""

    checks: list[Check] = field(default_factory=list[Check])
    findings: list[Finding] = field(default_factory=list[Finding])

    def holds(self, name: str, detail: str = "") -> None:
        self.checks.append(Check(name=name, outcome="holds", detail=detail))

    def skip(self, name: str, why: str) -> None:
        self.checks.append(Check(name=name, outcome="not checked", detail=why))

    def fails(self, name: str, *findings: Finding) -> None:
        self.checks.append(Check(name=name, outcome="fails", detail=findings[0].message))
        self.findings += findings

    def equal(self, name: str, code: str, what: str, found: Difference | None) -> None:
        """Holds where there is no difference."""
        if found is None:
            self.holds(name)
        else:
            self.fails(name, Finding(code=code, message=f"{what}: {found}", size=found.size))

    @contextmanager
    def attempt(self, name: str, code: str) -> Generator[None]:
        """A check that cannot be made is named as such, with the reason. It fails where the compiled model alone raises an error."""
        try:
            yield
        except Unreachable as reason:
            self.skip(name, str(reason))
        except Broken as error:
            self.fails(name, Finding(code=code, message=f"{name}: {error}"))
        except PeftcError as error:
            self.skip(name, f"{error.diagnostics[0].code}: {error.diagnostics[0].message}")


# Without edits -------------------------------------------------------------------------------------------------------


def check_base(trial: Trial, batch: Batch, original: nn.Module | None, done: Results) -> None:
    """Disabled and removed edits leave the base, bit for bit."""
    name, other = "disabled equals the base", "removed equals the base"
    with torch.no_grad():
        base = results(trial.base(**batch))
        with done.attempt(name, "P607"), disabled(trial.copy):
            with trial.telling(batch, EVALUATION):
                off = results(trial.copy(**batch))
            done.equal(name, "P607", "inside `peftc.disabled`", difference(base, off, 0))
        if original is None:
            return
        with done.attempt(other, "P608"), training(original, False):
            first = plain(original, batch)
            found = difference(first, base, 0) or state(original, trial.base)
            done.equal(other, "P608", "after `peftc.remove`", found)


def plain(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The results of a model that nobody says anything about. Raises: Unreachable where it does not run."""
    try:
        with torch.no_grad():
            return results(model(**batch))
    except Exception as error:  # whatever the model's own code raises
        if passes(error):
            raise
        raise Unreachable(f"it does not run: {error_summary(error)}") from error


def state(first: nn.Module, second: nn.Module) -> Difference | None:
    """The first parameter, buffer or class of module that differs."""
    classes = {name: type(module) for name, module in first.named_modules()}
    for name, module in second.named_modules():
        if classes.get(name) is not type(module):
            return Difference(name, float("inf"), 0.0, 0.0)
    return difference(dict(first.state_dict()), dict(second.state_dict()), 0)


# With edits ----------------------------------------------------------------------------------------------------------


def check_equations(trial: Trial, batch: Batch, done: Results) -> bool:
    """Whether the outputs are what the equations say: with the present parameters, and far from them, in every way of calling."""
    if trial.unreached:
        count = len(trial.unreached)
        for name in ("outputs", "gradients", "ways of calling"):
            done.skip(f"{name} equal the equations", f"{count} sites could not be witnessed")
        return False
    for name, move in (("outputs equal the equations", False), ("outputs equal the equations, parameters moved", True)):
        trial.reset()
        with done.attempt(name, "P602"):
            if move:
                trial.randomise(batch)
            found = difference(trial.expected(batch, EVALUATION).outputs, trial.compiled(batch, EVALUATION).outputs)
            if found is None:
                done.holds(name)
                continue
            done.fails(name, located(trial, batch, found))
        return False
    for mode in (WITH_GRADIENTS, TRAINING, WITH_DROPOUT, INFERENCE):
        with done.attempt(f"{mode.name}: outputs", "P610"):
            check_mode(trial, batch, mode, done)
        trial.without_gradients()
    return True


def check_mode(trial: Trial, batch: Batch, mode: Mode, done: Results) -> None:
    """With gradients, in training, or in inference."""
    warm(trial, batch, mode)
    want = trial.expected(batch, EVALUATION if mode is INFERENCE else mode)
    got = trial.compiled(batch, mode)
    if difference(want.outputs, got.outputs) is not None and is_random(trial, batch, mode, got):
        done.skip(f"{mode.name}: outputs", "two calls of the model differ, with the same parameters and inputs")
        return
    found = difference(want.outputs, got.outputs)
    if found is None:
        done.holds(f"{mode.name}: outputs")
    else:
        done.fails(f"{mode.name}: outputs", differing(trial, batch, mode, found))
    if mode.gradients:
        check_gradients(trial, mode, want, got, done)


def differing(trial: Trial, batch: Batch, mode: Mode, found: Difference) -> Finding:
    """That a way of calling differs, with the first module that does so where it can be seen."""
    module, place = None, None
    with suppress(Unreachable, Broken):
        module, place = first_module(trial, batch, mode)
    edit, site = place or (None, None)
    message = f"in {mode.name}: {found}"
    return Finding(code="P610", message=message, edit=edit, site=site, module=module, size=found.size)


def is_random(trial: Trial, batch: Batch, mode: Mode, run: Run) -> bool:
    """Whether another call gives something else."""
    return difference(run.outputs, trial.compiled(batch, mode).outputs) is not None


def warm(trial: Trial, batch: Batch, mode: Mode) -> None:
    """One plain call: what is compiled when it is first called is not compiled under a torch function mode."""
    if mode.train:
        with trial.tasked(), training(trial.copy, True), torch.no_grad(), trial.telling(batch, mode):
            trial.copy(**batch)


def check_gradients(trial: Trial, mode: Mode, want: Run, got: Run, done: Results) -> None:
    """Every parameter of the edits has the gradient of the equations, and no other parameter has one."""
    if want.failure or got.failure:
        done.skip(f"{mode.name}: gradients", want.failure or got.failure)
        return
    floor = max((value.abs().max().item() for value in want.gradients.values() if value.numel()), default=0.0)
    for name, first in want.gradients.items():
        found = difference({name: first}, {name: got.gradients[name]}, GRADIENT)
        if found is not None and found.size > 1e-2 * found.bound / GRADIENT + _floor(first) * floor:
            edit, site = [*name.split("/"), "", ""][:2]
            message = f"in {mode.name}, the gradient of {found}"
            done.fails(
                f"{mode.name}: gradients", Finding(code="P603", message=message, edit=edit, site=site, size=found.size)
            )
            break
    else:
        done.holds(f"{mode.name}: gradients", f"{len(want.gradients)} parameters")
    own = {id(p) for p in trial.own.values()}
    others = [n for n, p in trial.copy.named_parameters() if id(p) not in own and p.grad is not None]
    if others:
        message = f"`{others[0]}` of the base has a gradient" + (f", and {len(others) - 1} more" if others[1:] else "")
        done.fails(f"{mode.name}: the base has no gradients", Finding(code="P611", message=message, module=others[0]))
    else:
        done.holds(f"{mode.name}: the base has no gradients")


def _floor(value: Tensor) -> float:
    return 1e-6 if value.dtype == torch.float32 else 1e-10 if value.dtype == torch.float64 else 1e-3


def check_fold(trial: Trial, batch: Batch, done: Results) -> None:
    """What folds computes the same in the weights. Last: the copy is folded."""
    name = "folded equals unfolded"
    with done.attempt(name, "P609"), trial.tasked():
        before = trial.compiled(batch, EVALUATION).outputs
        report = fold(trial.copy)
        if not report.folded:
            done.skip(name, "no edit folds")
            return
        with trial.telling(batch, EVALUATION):
            after = trial.compiled(batch, EVALUATION).outputs if report.refused else _plain(trial.copy, batch)
        edits = ", ".join(f"`{one.edit}`" for one in report.folded)
        done.equal(name, "P609", f"after folding {edits}", difference(before, after, 10.0))


def _plain(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    with torch.no_grad():
        return results(model(**batch))


# Where a difference comes from ---------------------------------------------------------------------------------------


def located(trial: Trial, batch: Batch, found: Difference) -> Finding:
    """The site that makes the difference: the first one whose parameters alone, moved, bring it about; else the last that acts
    before the first module which takes other values.
    """
    moved = trial.values()
    module, place = first_module(trial, batch, EVALUATION)
    suspects = _suspects(trial, batch, place)
    trial.reset(moved)
    if suspects:
        place = suspects[0]
    edit, site = place or (None, None)
    states = [a.state for p in trial.record.site_edits if (p.edit, p.site.path) == place for a in p.assigns]
    message = f"the model does not compute what the spec says: {found}"
    return Finding(
        code="P602",
        message=message,
        edit=edit,
        site=site,
        state=", ".join(states) or None,
        module=module,
        size=found.size,
    )


def first_module(trial: Trial, batch: Batch, mode: Mode) -> tuple[str | None, Place | None]:
    """The first module that takes other values, and the edit that makes them: the one whose own module returns other values before,
    else the one that acted last.
    """
    want, got = Recorder(), Recorder()
    trial.expected(batch, EVALUATION if mode is INFERENCE else mode, want)
    trial.compiled(batch, mode, got)
    first = first_difference(want.events, got.events)
    if first is None:
        return None, None
    # What a module of a generated class returns is seen behind its edits; what others return may be seen before them.
    rewritten = {name for name, _ in trial.record.regions}
    at = {(p.edit, p.site.path): p.site.module for p in trial.record.site_edits if p.site.module in rewritten}
    own = first_output(want.events, got.events, set(at.values()), first[0])
    places = [place for place in want.places if own is not None and at.get(place) == own.module]
    return first[0].module or "the model", places[-1] if places else want.place_before(first[0])


def _suspects(trial: Trial, batch: Batch, place: Place | None) -> list[Place]:
    """The first site at which the copy answers to a change of parameters in another way than the equations."""
    trial.reset()
    if difference(trial.expected(batch, EVALUATION).outputs, trial.compiled(batch, EVALUATION).outputs) is not None:
        return []  # at the present parameters already: no change tells sites apart
    for placed in trial.record.site_edits:
        if wrong_alone(trial, batch, placed) is not None:
            return [(placed.edit, placed.site.path)]
    return []


def wrong_alone(trial: Trial, batch: Batch, placed: ir.SiteEdit) -> Difference | None:
    """The difference from the equations with the parameters of one edit at one site moved, and no others."""
    trial.reset()
    trial.perturb(trial.parameters_of(placed))
    return difference(trial.expected(batch, EVALUATION).outputs, trial.compiled(batch, EVALUATION).outputs)
