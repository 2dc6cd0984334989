"""Choosing what selective edits train, from data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef
from peftc.concurrency.interrupts import Deferral, shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.lines_module import Lines
from peftc.forms.masked_module import MaskedSites
from peftc.forms.module import FormModule
from peftc.forms.pruned_module import PrunedValues
from peftc.forms.sparse_module import SparseValues
from peftc.installation.presence import active_installation
from peftc.installation.record import Installation
from peftc.installation.surgery import identifier, refuse_quantised, view_of
from peftc.planning import ir
from peftc.rewriting.container import SHARED

Batch = Mapping[str, Any]
CHOOSERS = (SparseValues, Lines, MaskedSites)
Loss = Callable[[nn.Module, Batch], Tensor]


def calibrate(
    model: nn.Module, data: Iterable[Batch] = (), *, loss: Loss | None = None, lr: float = 1e-4, name: str | None = None
) -> dict[str, int]:
    """Chooses what is trained: the entries of every `sparse` edit, among those of all its sites at once; the rows (columns) of every
    `lines`, at each site. Their values begin with zero. And what of every `sparse_adapter` is not pruned, among all its sites; it
    begins with what it was drawn with. And what is kept of every `masked` of what it has trained, the largest |z Δ| among all its
    sites; training may go on with these.

    `select=fisher`: of the largest Σ (∂loss)² over the batches (Sung et al. 2021, Eq. 3, with the labels of the data). `change`:
    of the largest |θ₁ − θ₀|, θ₁ after one pass of AdamW over the batches (Ansell et al. 2022), which is undone. `magnitude`:
    of the largest |θ|. `snip`: of the largest |θ · Σ ∂loss| (Lee et al. 2019). Rows have the sums of theirs (Vucetic et al. 2022).
    `random` edits have been chosen already. The base, gradients, modes and `requires_grad` are as before.

    Args: `data`: batches, keyword arguments of a forward. `loss`: of the model and a batch; the `loss` of its result without
    it. `lr`: of AdamW. `name`: of one spec. Edits `per task` choose for the task that is present (`peftc.task`); without
    one, for all of them where no batch is run (`magnitude`, `masked`).
    Returns: how many entries (rows, columns) were chosen, by edit.
    Raises: P410 (not compiled), P413, P529, P533 where batches are run and none of several tasks is present, P541 where
    there is nothing to choose or the batches give no gradients, P542 for weights of the base that are quantised.
    """
    record = active_installation(model)
    edits = {edit for part in record.selected(name) for edit in part.edits}
    found = [choice for choice in choices_of(model, record) if choice.edit in edits]
    if not found:
        raise PeftcError(Diagnostic("P541", "the model has no edit of which something is to be chosen"))
    batches = _batches(data)
    if not isinstance(lr, int | float) or not 0 < lr < inf:  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"`lr` is {lr!r}, and the steps of AdamW are of a positive, finite size"
        raise PeftcError(Diagnostic("P541", message, help="leave it out for 1e-4"))
    if loss is not None and not callable(loss):
        message = f"`loss` is a {type(loss).__name__}, and nothing that can be called"
        raise PeftcError(Diagnostic("P541", message, help="loss=lambda model, batch: …"))
    ways = {choice.module.way for choice in found}
    if not batches and ways - {"magnitude", "value"}:
        raise PeftcError(Diagnostic("P541", "there are no batches to choose from", help="calibrate(model, batches)"))
    if ways - {"magnitude", "value"} and len(record.task.names) > 1 and record.task.present is None:
        help_ = (
            f'with peftc.task(model, "{record.task.names[0]}"): peftc.calibrate(model, batches), and so for each task'
        )
        raise PeftcError(Diagnostic("P533", "batches are of one task each, and none is chosen", help=help_))
    places: list[Tensor] = []
    scores = {w: SCORES[w](model, leaves_of(found, w), batches, loss or own_loss, lr) for w in sorted(ways - {"value"})}
    for choice in found:
        units = choice.units(scores.get(choice.module.way, {}))
        if not bool(torch.isfinite(units).all()) or not bool(units.any()):
            raise PeftcError(_alike(choice.edit, not bool(torch.isfinite(units).all())))
        places.append(units.topk(choice.module.count)[1])
    chosen = Counter[str]()
    with Deferral():
        for choice, where in zip(found, places, strict=True):  # all of them, or none
            choice.module.choose(where)
            chosen[choice.edit] += len(where)
    return dict(chosen)


def _alike(edit: str, infinite: bool) -> Diagnostic:
    """What is said where no entry has a larger score than another."""
    message = f"`{edit}`: nothing tells some of it from the rest"
    if infinite:
        help_ = "the loss of each batch, and its gradients, must be finite"
        return Diagnostic("P541", message, notes=("scores are NaN or infinite",), help=help_)
    help_ = (
        "write `w += …`: the change begins with zero, and as a factor it hides what it multiplies. Or the loss of these batches does "
        "not depend on the sites"
    )
    return Diagnostic("P541", message, notes=("all scores are zero",), help=help_)


def _batches(data: Iterable[Batch]) -> list[Batch]:
    """Raises: P541 for one batch, and for what is none."""
    if isinstance(data, Iterable) and not isinstance(data, Mapping | str):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        return list(data)
    message = f"the batches are a list or a loader of them, not a {type(data).__name__}"
    raise PeftcError(Diagnostic("P541", message, help="calibrate(model, [batch, …])"))


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The `loss` that a model gives with labels."""
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"a batch is a dictionary of the forward's arguments, not a {type(batch).__name__}"
        raise PeftcError(Diagnostic("P541", message, help='write {"input_ids": …, "labels": …}, or pass `loss=`'))
    found = getattr(model(**batch), "loss", None)
    if isinstance(found, Tensor):
        return found
    raise PeftcError(Diagnostic("P541", "the model gives no `loss` for a batch", help="add labels, or pass `loss=`"))


@dataclass(frozen=True)
class Choice:
    """What `module` trains of `own`, weights and biases in the order in which sites are counted; chosen by the scores of `refs`. One
    that prunes what is its own has neither. `edit`, `place`: the first edit of theirs, the name of the module.
    """

    edit: str
    place: str
    module: SparseValues | Lines | MaskedSites
    own: list[WeightRef] = field(default_factory=list[WeightRef])
    refs: list[WeightRef] = field(default_factory=list[WeightRef])

    def units(self, scores: Mapping[str, Tensor]) -> Tensor:
        if isinstance(self.module, MaskedSites):
            return self.module.flat().abs()
        if isinstance(self.module, PrunedValues):
            return scores[self.place]
        return self.module.units([view_of(scores[key(ref)], ref) for ref in self.refs])


def choices_of(model: nn.Module, record: Installation) -> list[Choice]:
    """What is to be chosen, but at random; of the present task alone where one is."""
    found: dict[str, Choice] = {}
    for placed in record.site_edits:
        for assign, one in applied(placed):
            for task, tail in one.task_suffixes():
                if not record.task.concerns(task):
                    continue
                place = chooser(model, record, placed, one, task, tail)
                module = None if place is None else model.get_submodule(place)
                if place is None or not isinstance(module, CHOOSERS) or module.way == "random":
                    continue
                choice = found.setdefault(place, Choice(placed.edit, place, module))
                own = placed.site.states[assign.state].weight
                if own is not None and not isinstance(module, PrunedValues | MaskedSites):
                    ref = placed.site.states[leading(placed, assign)].weight if isinstance(module, Lines) else own
                    choice.own.append(own)
                    choice.refs.append(ref or own)
    return list(found.values())


def applied(placed: ir.SiteEdit) -> Iterator[tuple[ir.Assign, ir.FormInstance]]:
    """The forms of an edit at a site, and where each stands first."""
    seen = set[int]()
    for assign in placed.assigns:
        for term in ir.subterms(assign.value):
            if isinstance(term, ir.FormCall) and id(term.instance) not in seen:
                seen.add(id(term.instance))
                yield assign, term.instance


def leading(placed: ir.SiteEdit, assign: ir.Assign) -> str:
    """The state whose rows are compared: those of a bias follow those of the weight, where the edit has rows of it, too."""
    rows = (a.state for a, one in applied(placed) if one.form.name == "lines" and one.args["by"] == "row")
    return "w" if assign.state == "b" and "w" in rows else assign.state


def chooser(
    model: nn.Module, record: Installation, placed: ir.SiteEdit, one: ir.FormInstance, task: str | None, tail: str
) -> str | None:
    """The name of the module that knows what of a form is trained, where there is such a choice."""
    owner = one.owner_of(task)
    name = f"{placed.edit}/{placed.site.path}/{one.key}"
    places = [f"{record.form_modules[name]}{tail}"] if one.has_site_parameters else []
    places += [f"{SHARED}.{identifier(owner)}"] if owner is not None else []
    return next((place for place in places if isinstance(model.get_submodule(place), CHOOSERS)), None)


@dataclass(frozen=True)
class Leaves:
    """What is scored in one way: parameters of the base, and all entries of what is pruned, by name."""

    base: tuple[str, ...]
    pruned: Mapping[str, PrunedValues]


def leaves_of(choices: Iterable[Choice], way: str) -> Leaves:
    found = [choice for choice in choices if choice.module.way == way]
    base = dict.fromkeys(key(ref) for choice in found for ref in (*choice.own, *choice.refs))
    pruned = {choice.place: choice.module for choice in found if isinstance(choice.module, PrunedValues)}
    return Leaves(tuple(base), pruned)


def key(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")


@shielded
def differentiable(
    model: nn.Module, leaves: Leaves, training: bool, values: dict[str, Tensor] | None = None
) -> Generator[dict[str, Tensor]]:
    """What is scored, with gradients of its own, and the model as it was afterwards. Nothing is pruned meanwhile. `values`: gets
    copies of those of now, which are put back.
    """
    parameters: dict[str, Tensor] = {name: model.get_parameter(name) for name in leaves.base}
    refuse_quantised(parameters, leaves.base)
    dense = {name: module.first().requires_grad_() for name, module in leaves.pruned.items()}
    parameters |= dense
    if values is not None:
        values |= {name: p.detach().clone() for name, p in parameters.items()}
    flags = {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    model.train(training)
    for module in model.modules():
        if isinstance(module, FormModule):
            module.training = False  # nothing has been chosen yet
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in parameters)
    for name, module in leaves.pruned.items():
        module.dense = dense[name]
    try:
        with torch.enable_grad():
            yield parameters
    finally:
        with torch.no_grad():
            for name, value in (values or {}).items():
                parameters[name].copy_(value)
        for module in leaves.pruned.values():
            module.dense = None
        for name, parameter in model.named_parameters():
            flag, grad = flags[name]
            parameter.requires_grad_(flag)
            parameter.grad = grad
        for name, module in model.named_modules():
            module.training = modes[name]


def backward(found: Tensor) -> None:
    """Raises: P541 where the loss does not depend on what is scored, or is no loss."""
    if not isinstance(found, Tensor) or found.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        said = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"the loss of a batch is one number that was computed by torch, not {said}"
        raise PeftcError(Diagnostic("P541", message, help="`loss=` returns a tensor with one entry"))
    if not found.requires_grad:
        message = "the loss of a batch has no gradient"
        raise PeftcError(
            Diagnostic("P541", message, help="give the loss as it was computed, outside of inference mode")
        )
    found.backward()


def gradients(
    model: nn.Module, parameters: Mapping[str, Tensor], batches: list[Batch], loss: Loss
) -> Iterator[dict[str, Tensor]]:
    """The gradients of each batch in turn, in float32; zero where there are none."""
    for batch in batches:
        for parameter in parameters.values():
            parameter.grad = None
        backward(loss(model, batch))
        yield {n: torch.zeros_like(p) if p.grad is None else p.grad.float() for n, p in parameters.items()}


def fisher(model: nn.Module, leaves: Leaves, batches: list[Batch], loss: Loss, lr: float) -> dict[str, Tensor]:
    """Σ (∂loss)² over the batches, in evaluation mode."""
    with differentiable(model, leaves, training=False) as parameters:
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        for found in gradients(model, parameters, batches, loss):
            for name, gradient in found.items():
                total[name] += gradient.square()
        return total


def snip(model: nn.Module, leaves: Leaves, batches: list[Batch], loss: Loss, lr: float) -> dict[str, Tensor]:
    """|θ · Σ ∂loss| over the batches, in evaluation mode."""
    with differentiable(model, leaves, training=False) as parameters:
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        for found in gradients(model, parameters, batches, loss):
            for name, gradient in found.items():
                total[name] += gradient
        return {name: (p.detach().float() * total[name]).abs() for name, p in parameters.items()}


def change(model: nn.Module, leaves: Leaves, batches: list[Batch], loss: Loss, lr: float) -> dict[str, Tensor]:
    """|θ₁ − θ₀| after one pass of AdamW without decay."""
    before: dict[str, Tensor] = {}
    with differentiable(model, leaves, training=True, values=before) as parameters:
        optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
        for batch in batches:
            optimizer.zero_grad()
            backward(loss(model, batch))
            optimizer.step()
        return {name: (p.detach() - before[name]).abs().float() for name, p in parameters.items()}


def magnitude(model: nn.Module, leaves: Leaves, batches: list[Batch], loss: Loss, lr: float) -> dict[str, Tensor]:
    """|θ|"""
    with differentiable(model, leaves, training=False) as parameters:
        return {name: p.detach().abs().float() for name, p in parameters.items()}


SCORES = {"fisher": fisher, "change": change, "magnitude": magnitude, "snip": snip}
