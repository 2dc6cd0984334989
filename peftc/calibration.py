"""Choosing the entries that `sparse` edits train, from data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
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
    it. `lr`: of AdamW. `name`: of one spec.
    Returns: how many entries were chosen, by edit.
    Raises: P410 (not compiled), P413, P529, P541 where there is nothing to choose or the batches give no gradients.
    """
    record = acting(model)
    edits = {edit for part in record.chosen(name) for edit in part.edits}
    found = {edit: sites for edit, sites in sites_of(model, record).items() if edit in edits}
    if not found:
        raise PeftcError(Diagnostic("P541", "the model has no `sparse` edit whose entries are to be chosen"))
    batches = list(data)
    ways = {str(sites[0][0].form_args["select"]) for sites in found.values()}
    if not batches and ways & {"fisher", "change"}:
        raise PeftcError(Diagnostic("P541", "there are no batches to choose from", help="calibrate(model, batches)"))
    refs = [ref for sites in found.values() for _, ref in sites]
    scores = {way: SCORES[way](model, refs, batches, loss or own_loss, lr) for way in sorted(ways)}
    chosen: dict[str, int] = {}
    for edit, sites in found.items():
        owner, way = sites[0][0], str(sites[0][0].form_args["select"])
        flat = torch.cat([view_of(scores[way][key(ref)], ref).reshape(-1) for _, ref in sites])
        if not bool(torch.isfinite(flat).all()) or not bool(flat.any()):
            raise PeftcError(Diagnostic("P541", f"`{edit}`: the batches tell no entry from another"))
        owner.choose(flat.topk(len(owner.values))[1])
        chosen[edit] = len(owner.values)
    return chosen


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The `loss` that a model gives with labels."""
    found = getattr(model(**batch), "loss", None)
    if isinstance(found, Tensor):
        return found
    raise PeftcError(Diagnostic("P541", "the model gives no `loss` for a batch", help="add labels, or pass `loss=`"))


def sites_of(model: nn.Module, record: Installation) -> dict[str, list[tuple[SparseValues, WeightRef]]]:
    """The sites of each `sparse` edit that is not random, in the order in which their entries are counted."""
    found: dict[str, list[tuple[SparseValues, WeightRef]]] = {}
    for placed in record.placed:
        for assign in placed.assigns:
            for one in (t.instance for t in ir.parts_of(assign.value) if isinstance(t, ir.Applied)):
                owner = None if one.owner is None else f"{SHARED}.{identifier(one.owner)}"
                module = None if owner is None else cast(FormModule, model.get_submodule(owner))
                ref = placed.site.states[assign.state].weight
                if isinstance(module, SparseValues) and ref is not None and module.form_args["select"] != "random":
                    found.setdefault(placed.edit, []).append((module, ref))
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
