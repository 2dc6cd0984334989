"""What a method needs of a training run: a call after each step, and terms of the loss."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from operator import index
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from peftc.concurrency.interrupts import Deferral, shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.arguments import integer
from peftc.forms.fusion_module import Fusion
from peftc.forms.masked_module import MaskedSites
from peftc.forms.mixture_module import Mixture
from peftc.forms.module import FormModule, seeded
from peftc.forms.svd_module import SVD
from peftc.forms.tasked_module import Tasked
from peftc.installation.presence import active_installation
from peftc.installation.record import Installation
from peftc.installation.surgery import identifier
from peftc.rewriting.container import SHARED


def step(model: nn.Module, step: int) -> None:
    """Tells the edits of a model that a step of training has been made: `svd` gives up ranks, `mixture` draws a new route.

    To be called after `loss.backward()` and `optimizer.step()`, and before the gradients are set to zero, as PEFT's
    `update_and_allocate`: importances are smoothed |p · ∂p|. What a step draws depends on the seed, the place and the number of
    the step alone, so that processes and accumulated batches agree. Each task of an edit `per task` has a budget of its own, and
    takes part in the steps of which the batch had examples of it.

    Args: `step`: from 0 or 1 on, one more each time.
    Raises: P410 (not compiled), P529 (switched off), P539 where an `svd` that gives up ranks has no gradients, P545 where `step` is
    no number.
    """
    record, step = active_installation(model), _number(step)
    groups: dict[tuple[str, str | None], list[tuple[str, SVD]]] = {}
    mixtures: list[tuple[str, Mixture]] = []
    for name, form in forms_of(model, record):
        if isinstance(form, SVD) and form.form_args["target"] is not None:
            groups.setdefault((name.partition("/")[0], task_of(name, record)), []).append((name, form))
        elif isinstance(form, Mixture):
            mixtures.append((name, form))
    trained = {key for key, found in groups.items() if any(form.is_trained() for _, form in found)}
    rounds: list[list[SVD]] = []
    for (edit, task), found in groups.items():
        forms = [form for _, form in found]
        ended = step > forms[0].last_round() and is_finished(forms)
        if not ended and task is not None and (edit, task) not in trained and any(name == edit for name, _ in trained):
            continue  # the batch had no examples of the task
        missing = [name for name, form in found if not form.has_gradients()]
        if missing and (step < forms[0].last_round() or not (is_finished(forms) or is_smoothed(forms))):
            message = f"`{edit}` has no gradients at {missing[0]}, which say what is important"
            raise PeftcError(Diagnostic("P539", message, help="call `peftc.step` before `optimizer.zero_grad()`"))
        rounds.append(forms)
    with Deferral():
        for name, mixture in mixtures:
            mixture.stepped(seeded(f"{record.owner(name.partition('/')[0]).seed}/{name}/{step}"))
        for forms in rounds:
            allocate(forms, step)


def _number(step: int) -> int:
    """The number of a step. Raises: P545 for what is none."""
    found = -1 if isinstance(step, bool) or not hasattr(step, "__index__") else index(step)
    if found < 0:
        message = f"a step of training is told by its number, not by {step!r}"
        raise PeftcError(Diagnostic("P545", message, help="peftc.step(model, 1), one more each time"))
    return found


def losses(
    model: nn.Module, *, inputs: Mapping[str, Any] | None = None, logits: Tensor | None = None
) -> dict[str, Tensor]:
    """The terms that methods add to the loss, by name; to be added up by whoever trains.

    `<edit>.orthogonality` of an `svd`: w · mean of ‖PᵀP − I‖ and ‖QQᵀ − I‖ over its sites (Frobenius), as PEFT has it; of the
    present task.
    `<edit>.l0` of a `masked`: penalty · the expected number of entries that are not zero, over its sites; of the present task (Guo
    et al. 2021), and none once `peftc.calibrate` has pruned. `<edit>.identity` of a `fusion`: penalty · Σ ‖I − V‖² over its sites,
    of the present task (AdapterHub). `consistency` of all `mixture`s: (KL(p‖p') + KL(p'‖p)) / 2 of `logits` and those of a second
    forward with another route; only where both arguments are given.

    Args: `inputs`, `logits`: the arguments of the forward that was made, and its logits (…, classes).
    Raises: P410 (not compiled), P529 (switched off), P545 (arguments that are none of a forward, or not its logits).
    """
    record = active_installation(model)
    _check_forward(inputs, logits)
    found: dict[str, list[Tensor]] = {}
    sums: dict[str, list[Tensor]] = {}
    routed: list[Mixture] = []
    for name, form in forms_of(model, record):
        edit = name.partition("/")[0]
        if isinstance(form, SVD) and form.form_args["orthogonality"] and of_present(name, record):
            found.setdefault(f"{edit}.orthogonality", []).append(form.orthogonality())
        elif isinstance(form, Mixture):
            routed.append(form)
        elif isinstance(form, Fusion) and (penalty := form.penalty()) is not None and of_present(name, record):
            sums.setdefault(f"{edit}.identity", []).append(penalty)
    terms = {name: torch.stack(values).mean() for name, values in found.items()}
    terms |= {name: torch.stack(values).sum() for name, values in sums.items()}
    for name, sites in counted(model, record).items():
        terms[f"{name}.l0"] = torch.stack([one.expected() for one in sites]).sum()
    if inputs is not None and logits is not None and routed:
        with another_route(routed):
            again = model(**inputs).logits
        if again.shape != logits.shape:
            message = f"`logits` are {list(logits.shape)}, and those of these inputs {list(again.shape)}"
            raise PeftcError(Diagnostic("P545", message, help="give the logits of the forward of `inputs`"))
        terms["consistency"] = consistency(logits, again)
    return terms


@shielded
def another_route(mixtures: list[Mixture]) -> Generator[None]:
    """Inside the block each forward draws the experts that it takes."""
    before = [form.get_buffer("route").clone() for form in mixtures]
    for form in mixtures:
        form.get_buffer("route").fill_(-1)
    try:
        yield
    finally:
        for form, route in zip(mixtures, before, strict=True):
            form.get_buffer("route").copy_(route)


def _check_forward(inputs: Mapping[str, Any] | None, logits: Tensor | None) -> None:
    """Raises: P545 where these are no arguments of a forward and its logits."""
    if inputs is not None and not isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"`inputs` is a dictionary of the forward's arguments, not a {type(inputs).__name__}"
        raise PeftcError(Diagnostic("P545", message))
    if logits is not None and not (isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim > 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"{list(logits.shape)}, {logits.dtype}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PeftcError(Diagnostic("P545", f"`logits` are a tensor (…, classes) of fractions, not {found}"))


def counted(model: nn.Module, record: Installation) -> dict[str, list[MaskedSites]]:
    """What is penalised for its entries, by edit: of the present task where one is, and not pruned yet."""
    found: dict[str, list[MaskedSites]] = {}
    seen = set[str]()
    for placed in record.site_edits:
        for one in placed.instances:
            for task, _ in one.task_suffixes():
                owner = one.owner_of(task)
                if owner is None or owner in seen or not record.task.concerns(task):
                    continue
                seen.add(owner)
                module = model.get_submodule(f"{SHARED}.{identifier(owner)}")
                if isinstance(module, MaskedSites) and not bool(module.get_buffer("pruned")):
                    found.setdefault(placed.edit, []).append(module)
    return found


def consistency(logits: Tensor, others: Tensor) -> Tensor:
    """(KL(p‖p') + KL(p'‖p)) / 2, the mean over all but the classes. Source: Wang et al. 2022, arXiv:2205.12410, Eq. 5."""
    p, q = F.log_softmax(logits.flatten(0, -2), -1), F.log_softmax(others.flatten(0, -2), -1)
    one, other = (F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p, q), (q, p)))
    return (one + other) / 2


class StepCallback(TrainerCallback):
    """Calls `peftc.step` in a Hugging Face `Trainer`: after the optimizer's step, before gradients are set to zero."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step(getattr(model, "module", model), state.global_step)


def forms_of(model: nn.Module, record: Installation) -> Iterator[tuple[str, FormModule]]:
    """The forms that have parameters, by the names under which these are saved; those of each task on their own."""
    for name, where in record.form_modules.items():
        form = cast(FormModule, model.get_submodule(where))
        if isinstance(form, Tasked):
            yield from ((f"{name}.tasks.{task}", form.form(task)) for task in form.tasks)
        else:
            yield name, form


def of_present(name: str, record: Installation) -> bool:
    """Whether a form, by its saved name, is not of a task beside the present one."""
    return record.task.concerns(task_of(name, record))


def task_of(name: str, record: Installation) -> str | None:
    """The task that a form is of, by its saved name."""
    place, _, key = name.rpartition("/")
    task = key.partition(".tasks.")[2] or place.rpartition(".tasks.")[2]  # of what sites have in common
    return task if task in record.task.names else None


@torch.no_grad()
def allocate(forms: list[SVD], step: int) -> None:
    """One round of AdaLoRA over all the sites of an edit (Zhang et al. 2023, algorithm 1): the budget falls with a cube from
    all ranks to `target` a site; the least important triplets, over all sites, lose their λ. What was not there in the last
    round has its own in the next step.
    """
    args = forms[0].form_args
    target, every, warmup = (integer(args, name) for name in ("target", "every", "warmup"))
    last = forms[0].last_round()
    ranks, budget = sum(len(form.values) for form in forms), target * len(forms)
    finished = is_finished(forms)
    if step > last and finished:
        for form in forms:
            form.values.masked_fill_(~form.get_buffer("kept"), 0.0)
        return
    if step < last or not (finished or is_smoothed(forms)):
        for form in forms:
            form.smooth()
    round_ = step >= last
    if step <= warmup and not round_:
        return
    if step < last:
        left = 1 - (step - warmup) / (last - warmup)
        budget, round_ = int((ranks - budget) * left**3 + budget), step % every == 0
    if round_ and ranks > budget:
        scores = [form.scores() for form in forms]
        threshold = torch.cat(scores).kthvalue(ranks - budget)[0]
        for form, score in zip(forms, scores, strict=True):
            form.get_buffer("kept").copy_(score > threshold)
            form.values.masked_fill_(score <= threshold, 0.0)


def is_finished(forms: list[SVD]) -> bool:
    """Whether no more than `target` ranks a site are left."""
    return sum(int(form.get_buffer("kept").sum()) for form in forms) <= integer(forms[0].form_args, "target") * len(
        forms
    )


def is_smoothed(forms: list[SVD]) -> bool:
    """Whether any importance is known."""
    return any(form.is_smoothed() for form in forms)
