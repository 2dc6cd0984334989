"""`peftc.verify`: what a compiled model computes, against what its spec says, computed on its base."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Site
from peftc.compiler import remove
from peftc.compiler import sites as sites_of
from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.installation.contents import parameters
from peftc.installation.record import Installation, installation_of, is_installed
from peftc.models.runnable import check_sample
from peftc.verification.batches import Batch, sample_batch
from peftc.verification.checks import Results, check_base, check_equations, check_fold
from peftc.verification.choices import choose
from peftc.verification.decoding import check_decoding
from peftc.verification.movement import Moved, check_movement
from peftc.verification.report import NotWitnessed, Verification, VerifiedEdit
from peftc.verification.roles import check_roles
from peftc.verification.trial import EVALUATION, Trial
from peftc.verification.witness.forms import Forms
from peftc.verification.witness.hooks import Witness
from peftc.verification.witness.locations import Unreachable
from peftc.verification.witness.outputs import results

Sites = Literal["sample", "all"]


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    sites: Sites = "sample",
    base: nn.Module | None = None,
    weights: str = "its weights",
) -> Verification:
    """Shows, by running a copy of a compiled model, that it computes what its spec says.

    The equations of the spec are computed a second time, by hooks on the base that share no code with the rewriter; outputs and
    gradients must be equal, in every way of calling. Each edit alone must move the output and nothing before its site. Without
    its edits the model must be the base, bit for bit; folded, what it was. The model itself is not touched.

    Args: `batch`: the keyword arguments of one forward; without it, what the model was compiled with, or random inputs of its
    kind. `sites`: which ones are perturbed alone: the first, a middle and the last of each kind, or "all". `base`: the model before
    it was compiled, to which it must return when its edits are removed. `weights`: where its weights are from, for the report.
    Raises: P410 (not compiled), P436 (an edited module was replaced), P507 (no inputs), P509 (it does not run on the batch), P545 (no batch), P601 (no weights, cannot be copied). What is wrong with the
    model is not raised: it is among the `findings` of the result, P602-P611.
    """
    record = installation_of(model)
    parameters(model)  # raises P436
    check_sample(batch)
    if sites not in ("sample", "all"):
        raise PeftcError(Diagnostic("P545", f'`sites` is "sample" or "all", not {sites!r}'))
    refuse_base(base)
    with torch.random.fork_rng(), own_dtypes():
        other = duplicate(model).eval()
        given = dict(batch) if batch is not None else sample_batch(other, record.sample)
        trial, table = prepared(other, given)
        done = Results()
        moved = examined(trial, given, table, sites == "all", base, done)
    return summary(trial, given, done, moved, weights)


def last_step(model: nn.Module) -> Callable[[nn.Module], None]:
    """The step that ends the compilation of `model` where it is verified: it raises what was found, so that all is undone.

    Raises: P601 where the model cannot be copied; the step P601-P611.
    """
    base = None if is_installed(model) else duplicate(model)

    def confirm(compiled: nn.Module) -> None:
        found = verify(compiled, base=base)
        if not found.ok:
            raise PeftcError(found.diagnostics)

    return confirm


def prepared(other: nn.Module, batch: Batch) -> tuple[Trial, dict[str, Site]]:
    """A copy of a model beside its base, and the sites of the base. Raises: P509 for a batch on which the base does not run."""
    base = remove(duplicate(other))
    refuse_batch(base, batch)
    choose(other, batch)
    record = installation_of(other)
    refuse_nan(parameters(other))
    table = {site.path: site for site in sites_of(base, sample=record.sample).sites}
    trained: dict[str, Tensor] = {name: other.get_parameter(name) for name in record.trained.values()}
    base.requires_grad_(False)
    witness = Witness(base, record.site_edits, table, Forms(other, record), trained)
    return Trial(other, base, record, parameters(other), witness), table


def refuse_base(base: object) -> None:
    """Raises: P545 for what is no model without edits."""
    if base is not None and (not isinstance(base, nn.Module) or is_installed(base)):
        what = "a compiled one" if isinstance(base, nn.Module) else f"a value of type {type(base).__name__}"
        message = f"`base` is the model before it was compiled, not {what}"
        raise PeftcError(Diagnostic("P545", message, help="leave it out: a copy without the edits is compared as well"))


def refuse_nan(trained: Mapping[str, Tensor]) -> None:
    """Raises: P601 for parameters of edits that are not numbers: whatever they are put in computes the same."""
    if wrong := [name for name, value in trained.items() if bool(value.isnan().any())]:
        raise PeftcError(Diagnostic("P601", f"`{wrong[0]}` has NaN entries: nothing can be compared"))


def refuse_batch(base: nn.Module, batch: Batch) -> None:
    """Raises: P509 where a model does not run on a batch, or all that it gives for it is NaN."""
    try:
        with torch.no_grad():
            found = results(base(**batch))
    except Exception as error:  # whatever the model's own code raises
        message = f"this {type(base).__name__} does not run on the batch"
        raise PeftcError(Diagnostic("P509", message, notes=(f"{type(error).__name__}: {error}",))) from error
    if found and all(bool(value.isnan().all()) for value in found.values()):
        message = f"all that this {type(base).__name__} gives for the batch is NaN, without any edit"
        raise PeftcError(Diagnostic("P509", message, help="look for NaN entries in the weights of the base"))


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of a model with its weights. Raises: P601."""
    names = [name for name, tensor in model.named_parameters() if not has_values(tensor)]
    if names:
        message = f"`{names[0]}` has no values, only a shape: nothing can be computed with it"
        help_ = "load all weights; a model whose weights are offloaded is verified before it is dispatched"
        raise PeftcError(Diagnostic("P601", message, help=help_))
    try:
        other = copy.deepcopy(model)
    except Exception as error:  # whatever copying an attribute of a module raises
        message = f"this {type(model).__name__} cannot be copied, and it is not verified in place"
        raise PeftcError(Diagnostic("P601", message, notes=(f"{type(error).__name__}: {error}",))) from error
    for (name, module), (_, same) in zip(model.named_modules(), other.named_modules(), strict=True):
        if type(module) is not type(same):
            message = f"a copy of `{name}` is not of its class, {type(module).__name__}: it may compute something else"
            raise PeftcError(Diagnostic("P601", message))
    return other


@shielded
def own_dtypes() -> Generator[None]:
    """Inside the block nothing is cast by autocast: copies of trained parameters that it keeps would outlive their changes."""
    devices = [device for device in ("cpu", torch.accelerator.current_accelerator()) if device is not None]
    with ExitStack() as stack:
        for device in map(str, devices):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def examined(
    trial: Trial, batch: Batch, sites: Mapping[str, Site], everywhere: bool, base: nn.Module | None, done: Results
) -> Moved:
    """All checks, one after the other; the fold last, since it changes the copy."""
    check_base(trial, batch, base, done)
    witnessed(trial, batch)
    equal = True
    for task in trial.tasks:
        trial.task = task
        equal = check_equations(trial, batch, done) and equal
    trial.task = trial.tasks[0]
    check_roles(trial, batch, everywhere, sites, done)
    with done.attempt("far from the present parameters", "P602"):
        trial.randomise(batch)
    moved = check_movement(trial, batch, everywhere, done)
    if equal or trial.unreached:
        check_decoding(trial, batch, done)
        check_fold(trial, batch, done)
    return moved


def witnessed(trial: Trial, batch: Batch) -> None:
    """One call of the base, to see which equations find their states."""
    everyone = [(placed.edit, placed.site.path) for placed in trial.record.site_edits]
    try:
        trial.expected(batch, EVALUATION)
    except Unreachable as reason:
        trial.unreached = dict.fromkeys(everyone, str(reason)) | trial.unreached
        return
    for write in trial.witness.missing():
        place = (write.placed.edit, write.placed.site.path)
        trial.unreached.setdefault(place, "no call of the base came to it")


def summary(trial: Trial, batch: Batch, done: Results, moved: Moved, weights: str) -> Verification:
    record: Installation = trial.record
    model = record.specs[0].plan.model
    sites = Counter(placed.edit for placed in record.site_edits)
    edits: list[VerifiedEdit] = []
    sites |= {e.name: len(e.sites) for part in record.specs for e in part.plan.edits if e.name not in sites}
    for name, count in sites.items():
        missing = tuple(
            NotWitnessed(site=site, reason=why) for (edit, site), why in trial.unreached.items() if edit == name
        )
        edits.append(
            VerifiedEdit(
                name=name,
                sites=count,
                witnessed=count - len(missing),
                perturbed=moved.perturbed[name],
                inert=moved.inert[name],
                not_witnessed=missing,
            )
        )
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
    return Verification(
        model=model.id,
        weights=weights,
        batch=shapes,
        edits=tuple(edits),
        checks=tuple(done.checks),
        findings=tuple(done.findings),
    )
