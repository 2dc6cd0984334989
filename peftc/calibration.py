"""Choosing the entries that `sparse` edits train, from data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule
from peftc.forms.sparse_module import SparseValues
from peftc.planning import ir
from peftc.rewriting.install import SHARED, identifier, view_of
from peftc.rewriting.record import Installation, acting
from peftc.tracing.sites import WeightRef

Batch = Mapping[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]


def calibrate(
    model: nn.Module, data: Iterable[Batch] = (), *, loss: Loss | None = None, lr: float = 1e-4, name: str | None = None
) -> dict[str, int]:
    """Chooses the entries of every `sparse` edit, among those of all its sites at once, and sets their values to zero.

    `select=fisher`: of the largest Σ (∂loss)² over the batches (Sung et al. 2021, Eq. 3, with the labels of the data). `change`:
    of the largest |θ₁ − θ₀|, θ₁ after one pass of AdamW over the batches (Ansell et al. 2022), which is undone. `magnitude`:
    of the largest |θ|. `random` edits have theirs already. The base, gradients, modes and `requires_grad` are as before.

    Args: `data`: batches, keyword arguments of a forward. `loss`: of the model and a batch; the `loss` of its result without
    it. `lr`: of AdamW. `name`: of one spec. Edits `per task` choose for the task that is present (`peftc.task`), or for all.
    Returns: how many entries were chosen, by edit.
    Raises: P410 (not compiled), P413, P529, P541 where there is nothing to choose or the batches give no gradients.
    """
    record = acting(model)
    edits = {edit for part in record.chosen(name) for edit in part.edits}
    found = {owner: sites for owner, sites in sites_of(model, record).items() if sites.edit in edits}
    if not found:
        raise PeftcError(Diagnostic("P541", "the model has no `sparse` edit whose entries are to be chosen"))
    batches = list(data)
    ways = {sites.way for sites in found.values()}
    if not batches and ways & {"fisher", "change"}:
        raise PeftcError(Diagnostic("P541", "there are no batches to choose from", help="calibrate(model, batches)"))
    refs = [ref for sites in found.values() for ref in sites.refs]
    scores = {way: SCORES[way](model, refs, batches, loss or own_loss, lr) for way in sorted(ways)}
    chosen: dict[str, int] = {}
    places: list[Tensor] = []
    for sites in found.values():
        flat = torch.cat([view_of(scores[sites.way][key(ref)], ref).reshape(-1) for ref in sites.refs])
        if not bool(torch.isfinite(flat).all()) or not bool(flat.any()):
            raise PeftcError(Diagnostic("P541", f"`{sites.edit}`: the batches tell no entry from another"))
        places.append(flat.topk(len(sites.owner.values))[1])
        chosen[sites.edit] = len(sites.owner.values)
    for sites, where in zip(found.values(), places, strict=True):  # all of them, or none
        sites.owner.choose(where)
    return chosen


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The `loss` that a model gives with labels."""
    found = getattr(model(**batch), "loss", None)
    if isinstance(found, Tensor):
        return found
    raise PeftcError(Diagnostic("P541", "the model gives no `loss` for a batch", help="add labels, or pass `loss=`"))


@dataclass(frozen=True)
class Sites:
    """The sites whose entries `owner` is chosen from, in the order in which they are counted. `edit`: the first of theirs."""

    edit: str
    owner: SparseValues
    refs: list[WeightRef] = field(default_factory=list[WeightRef])

    @property
    def way(self) -> str:
        return str(self.owner.form_args["select"])


def sites_of(model: nn.Module, record: Installation) -> dict[str, Sites]:
    """The sites of each set of `sparse` values that is not random, by the name of the set."""
    found: dict[str, Sites] = {}
    present = record.task.present
    for placed in record.placed:
        for assign in placed.assigns:
            ref = placed.site.states[assign.state].weight
            for one in (t.instance for t in ir.parts_of(assign.value) if isinstance(t, ir.Applied)):
                for task, _ in one.copies():
                    owner = one.owner_of(task)
                    if (
                        owner is None
                        or ref is None
                        or (task is not None and isinstance(present, str) and task != present)
                    ):
                        continue
                    module = cast(FormModule, model.get_submodule(f"{SHARED}.{identifier(owner)}"))
                    if isinstance(module, SparseValues) and module.form_args["select"] != "random":
                        found.setdefault(owner, Sites(placed.edit, module)).refs.append(ref)
    return found


def key(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")


@contextmanager
def differentiable(model: nn.Module, names: Iterable[str], training: bool) -> Generator[dict[str, nn.Parameter]]:
    """The parameters of these names with gradients of their own, and the model as it was afterwards."""
    parameters = {name: model.get_parameter(name) for name in dict.fromkeys(names)}
    flags = {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    model.train(training)
    for module in model.modules():
        if isinstance(module, FormModule):
            module.training = False  # nothing has been chosen yet
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in parameters)
    try:
        yield parameters
    finally:
        for name, parameter in model.named_parameters():
            flag, grad = flags[name]
            parameter.requires_grad_(flag)
            parameter.grad = grad
        for name, module in model.named_modules():
            module.training = modes[name]


def fisher(
    model: nn.Module, refs: Iterable[WeightRef], batches: list[Batch], loss: Loss, lr: float
) -> dict[str, Tensor]:
    """Σ (∂loss)² over the batches, in evaluation mode."""
    with differentiable(model, map(key, refs), training=False) as parameters:
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        for batch in batches:
            for parameter in parameters.values():
                parameter.grad = None
            loss(model, batch).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    total[name] += parameter.grad.float().square()
        return total


def change(
    model: nn.Module, refs: Iterable[WeightRef], batches: list[Batch], loss: Loss, lr: float
) -> dict[str, Tensor]:
    """|θ₁ − θ₀| after one pass of AdamW without decay."""
    with differentiable(model, map(key, refs), training=True) as parameters:
        before = {name: p.detach().clone() for name, p in parameters.items()}
        optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
        try:
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            return {name: (p.detach() - before[name]).abs().float() for name, p in parameters.items()}
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(before[name])


def magnitude(
    model: nn.Module, refs: Iterable[WeightRef], batches: list[Batch], loss: Loss, lr: float
) -> dict[str, Tensor]:
    """|θ|"""
    return {key(ref): model.get_parameter(key(ref)).detach().abs().float() for ref in refs}


SCORES = {"fisher": fisher, "change": change, "magnitude": magnitude}
