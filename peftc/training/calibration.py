"""Selects what selective edits train, from data."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import WeightRef
from peftc.concurrency.interrupts import Deferral, shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equations.definition import TextForm
from peftc.forms.module import FormModule
from peftc.forms.selective_module import SelectiveModule
from peftc.installation.base_weights import refuse_quantised, view_of
from peftc.installation.builder import shared_name
from peftc.installation.completeness import active_installation
from peftc.installation.record import Installation
from peftc.planning import ir

Batch = Mapping[str, Any]
Loss = Callable[[nn.Module, Batch], Tensor]
NOT_FINITE = ("scores are NaN or infinite", "the loss of each batch, and its gradients, must be finite")
ALL_ZERO = (
    "all scores are zero",
    "write `w += …`: the change starts at zero, and as a factor it hides what it multiplies. Or the "
    "loss of these batches does not depend on the sites",
)


def calibrate(
    model: nn.Module, data: Iterable[Batch] = (), *, loss: Loss | None = None, lr: float = 1e-4, name: str | None = None
) -> dict[str, int]:
    """Selects what the selective edits of a model train.

    - `sparse`: the entries of all sites together; `lines`: the rows (columns) of each site. Their
      values start at zero.
    - `sparse_adapter`: the entries of all sites that are not pruned, which keep their initial
      values.
    - `masked`: the largest |z Δ| of all sites, after training, which may continue with them.

    Entries are ranked by `select`: `fisher` by Σ (∂loss)² over the batches; `change` by |θ₁ − θ₀|,
    with θ₁ after one pass of AdamW, which is undone; `magnitude` by |θ|; `snip` by |θ · Σ ∂loss|.
    Rows are ranked by the sum of their entries. `random` edits are selected already. The base, its
    gradients, modes and `requires_grad` are as before.

    Args:
        model: a compiled model.
        data: batches, each the keyword arguments of a forward.
        loss: a function of the model and a batch; by default the `loss` of the model's result.
        lr: the learning rate of AdamW.
        name: of one spec. Edits `per task` select for the current task (`peftc.task`); without one,
            for all tasks, if no batch is run (`magnitude`, `masked`).

    Returns:
        The number of selected entries (rows, columns) by edit.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P529 (switched off), P533
            (batches without a task), P541 (nothing to select, or no gradients), P542 (quantised
            weights).

    Source: Sung et al. 2021, Eq. 3 (fisher); Ansell et al. 2022 (change); Lee et al. 2019 (snip);
    Vucetic et al. 2022 (rows).
    """
    record = active_installation(model)
    edits = {edit for spec in record.selected(name) for edit in spec.edits}
    selectors = [selector for selector in selectors_of(model, record) if selector.edit in edits]
    if not selectors:
        raise PeftcError(Diagnostic("P541", "the model has no edit that selects what it trains"))
    batches = _check_arguments(data, loss, lr)
    criteria = {selector.module.criterion for selector in selectors}
    if criteria - {"magnitude", "value"}:
        if not batches:
            raise PeftcError(Diagnostic("P541", "there are no batches to select by", help="calibrate(model, batches)"))
        if len(record.task.names) > 1 and record.task.present is None:
            block = f'with peftc.task(model, "{record.task.names[0]}"): peftc.calibrate(model, batches)'
            message = "a batch is of one task, and no task is selected"
            raise PeftcError(Diagnostic("P533", message, help=f"{block}, and so for each task"))
    loss = loss or model_loss
    scores = {c: scores_by(c, model, selectors, batches, loss, lr) for c in sorted(criteria - {"value"})}
    selections: list[Tensor] = []
    for selector in selectors:
        units = selector.units(scores.get(selector.module.criterion, {}))
        is_finite = bool(torch.isfinite(units).all())
        if not is_finite or not bool(units.any()):
            message = f"`{selector.edit}`: the scores do not rank its entries"
            note, help_ = ALL_ZERO if is_finite else NOT_FINITE
            raise PeftcError(Diagnostic("P541", message, notes=(note,), help=help_))
        selections.append(units.topk(selector.module.unit_count)[1])
    counts = Counter[str]()
    with Deferral():  # selects for all edits or for none
        for selector, selection in zip(selectors, selections, strict=True):
            selector.module.choose(selection)
            counts[selector.edit] += len(selection)
    return dict(counts)


def _check_arguments(data: Iterable[Batch], loss: Loss | None, lr: float) -> list[Batch]:
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"the batches are a list or a loader of them, not a {type(data).__name__}"
        raise PeftcError(Diagnostic("P541", message, help="calibrate(model, [batch, …])"))
    batches = list(data)
    if not isinstance(lr, int | float) or not 0 < lr < inf:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`lr` is {lr!r}, but a learning rate is positive and finite"
        raise PeftcError(Diagnostic("P541", message, help="leave it out for 1e-4"))
    if loss is not None and not callable(loss):
        message = f"`loss` is a {type(loss).__name__}, not a function"
        raise PeftcError(Diagnostic("P541", message, help="loss=lambda model, batch: …"))
    return batches


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    if not isinstance(batch, Mapping) or not all(isinstance(name, str) for name in batch):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"a batch is a dictionary of the forward's arguments, not a {type(batch).__name__}"
        raise PeftcError(Diagnostic("P541", message, help='write {"input_ids": …, "labels": …}, or pass `loss=`'))
    loss = getattr(model(**batch), "loss", None)
    if isinstance(loss, Tensor):
        return loss
    raise PeftcError(Diagnostic("P541", "the model returns no `loss` for a batch", help="add labels, or pass `loss=`"))


@dataclass(frozen=True)
class Selector:
    """A form module that selects what it trains: entries of weights, or its own values."""

    edit: str  # the first that uses it
    name: str
    module: SelectiveModule
    weights: list[WeightRef] = field(default_factory=list[WeightRef])  # in the order of its sites
    scored: list[WeightRef] = field(default_factory=list[WeightRef])  # those by whose scores it selects

    def units(self, scores: Mapping[str, Tensor]) -> Tensor:
        match self.module.scored:
            case "nothing":
                return self.module.units(())
            case "all":
                return self.module.units([scores[self.name]])
            case "weights":
                return self.module.units([view_of(scores[key(ref)], ref) for ref in self.scored])


def selectors_of(model: nn.Module, record: Installation) -> list[Selector]:
    """All selectors but the random ones; of the current task alone if there is one."""
    selectors: dict[str, Selector] = {}
    for site_edit in record.site_edits:
        terms = ((assign, term) for assign in site_edit.assigns for term in ir.subterms(assign.value))
        first: dict[int, tuple[ir.Assign, ir.FormInstance]] = {}  # the first use of each form
        for assign, term in terms:
            if isinstance(term, ir.FormCall):
                first.setdefault(id(term.instance), (assign, term.instance))
        calls = list(first.values())
        row_states = [assign.state for assign, one in calls if selects_rows(one)]
        for assign, instance in calls:
            for task, suffix in instance.task_suffixes():
                if not record.task.concerns(task):
                    continue
                owner = instance.owner_of(task)
                place = f"{site_edit.edit}/{site_edit.site.path}/{instance.key}"
                names = [f"{record.form_modules[place]}{suffix}"] if instance.has_site_parameters else []
                names += [shared_name(owner)] if owner is not None else []
                modules = ((name, model.get_submodule(name)) for name in names)
                name, module = next(((n, m) for n, m in modules if isinstance(m, SelectiveModule)), ("", None))
                if module is None or module.criterion == "random":
                    continue
                selector = selectors.setdefault(name, Selector(site_edit.edit, name, module))
                weight = site_edit.site.states[assign.state].weight
                if weight is not None and module.scored == "weights":
                    # Entries of a bias follow the ranks of the rows of the weight.
                    follows = selects_rows(instance) and assign.state == "b" and "w" in row_states
                    selector.weights.append(weight)
                    selector.scored.append(site_edit.site.states["w" if follows else assign.state].weight or weight)
    return list(selectors.values())


def selects_rows(instance: ir.FormInstance) -> bool:
    """Whether a form selects rows of each weight or bias."""
    return isinstance(instance.form, TextForm) and instance.form.selects_rows(instance.args, instance.dims)


def key(ref: WeightRef) -> str:
    return f"{ref.module}.{ref.attribute}".lstrip(".")


@shielded
def differentiable(
    model: nn.Module, selectors: Sequence[Selector], values: dict[str, Tensor] | None = None
) -> Generator[dict[str, Tensor]]:
    """Yields what is scored, unpruned and with gradients, by name, and restores the model.

    With `values` the model trains; they receive copies, which are restored.
    """
    base = tuple(dict.fromkeys(key(ref) for s in selectors for ref in (*s.weights, *s.scored)))
    pruned = {s.name: s.module for s in selectors if s.module.scored == "all"}
    parameters: dict[str, Tensor] = {name: model.get_parameter(name) for name in base}
    refuse_quantised(model, parameters, base)
    dense = {name: module.first_values().requires_grad_() for name, module in pruned.items()}
    parameters |= dense
    if values is not None:
        values |= {name: p.detach().clone() for name, p in parameters.items()}
    flags = {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()}
    modes = {n: m.training for n, m in model.named_modules()}
    model.train(values is not None)
    for module in model.modules():
        if isinstance(module, FormModule):
            module.training = False  # a form refuses to train before its selection
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in parameters)
    for name, module in pruned.items():
        module.dense = dense[name]
    try:
        with torch.enable_grad():
            yield parameters
    finally:
        with torch.no_grad():
            for name, value in (values or {}).items():
                parameters[name].copy_(value)
        for module in pruned.values():
            del module.dense  # of the instance: the class has None
        for name, parameter in model.named_parameters():
            flag, grad = flags[name]
            parameter.requires_grad_(flag)
            parameter.grad = grad
        for name, module in model.named_modules():
            module.training = modes[name]


def backward(loss: Tensor) -> None:
    """Raises: P541 for anything but a scalar with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        kind = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"the loss of a batch is one number that was computed by torch, not {kind}"
        raise PeftcError(Diagnostic("P541", message, help="`loss=` returns a tensor with one entry"))
    if not loss.requires_grad:
        help_ = "give the loss as it was computed, outside of inference mode"
        raise PeftcError(Diagnostic("P541", "the loss of a batch has no gradient", help=help_))
    loss.backward()


def scores_by(
    criterion: str, model: nn.Module, selectors: Iterable[Selector], batches: list[Batch], loss: Loss, lr: float
) -> dict[str, Tensor]:
    """The scores that `calibrate` defines, by name, for the selectors with this criterion."""
    selectors = [selector for selector in selectors if selector.module.criterion == criterion]
    before: dict[str, Tensor] = {}
    with differentiable(model, selectors, before if criterion == "change" else None) as parameters:
        if criterion == "magnitude":
            return {name: p.detach().abs().float() for name, p in parameters.items()}
        if criterion == "change":
            optimizer = torch.optim.AdamW(parameters.values(), lr=lr, weight_decay=0.0)
            for batch in batches:
                optimizer.zero_grad()
                backward(loss(model, batch))
                optimizer.step()
            return {name: (p.detach() - before[name]).abs().float() for name, p in parameters.items()}
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        for batch in batches:
            for parameter in parameters.values():
                parameter.grad = None
            backward(loss(model, batch))
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    total[name] += gradient.square() if criterion == "fisher" else gradient
        if criterion == "fisher":
            return total
        return {name: (p.detach().float() * total[name]).abs() for name, p in parameters.items()}  # snip
