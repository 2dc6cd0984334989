"""The hooks of methods into training: a call after each optimizer step, and terms of the loss."""

from collections.abc import Iterator, Mapping
from operator import index
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from peftc.concurrency.interrupts import Deferral
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.budget_module import BudgetModule, allocate, is_finished, is_smoothed
from peftc.equation_code.random_module import RandomModule, drawn_anew
from peftc.forms.module import FormModule, seeded
from peftc.installation.completeness import active_installation
from peftc.installation.record import Installation
from peftc.task_modules.tasked_module import Tasked


def step(model: nn.Module, step: int) -> None:
    """Updates forms after a training step: forms with a budget (`svd`) give up entries, forms with
    random numbers (`mixture`) draw them anew, a Python form does what `FormModule.after_step` says.

    Call it after `optimizer.step()` and before `optimizer.zero_grad()`, like PEFT's
    `update_and_allocate`: importances are smoothed |p · ∂p|. Random numbers depend only on the
    seed, the site and the step, so that processes agree. Each task of an edit `per task` has its
    own budget, and is skipped in steps without examples of it.

    Args:
        model: a compiled model.
        step: the number of the optimizer step: 0 or 1 at first, then one more each time.

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P539 (a form with a budget has no
            gradients), P545 (`step` is not a number).

    Source: AdaLoRA, Zhang et al. 2023, arXiv:2303.10512; AdaMix, Wang et al. 2022,
    arXiv:2205.12410.
    """
    record = active_installation(model)
    if isinstance(step, bool) or not hasattr(step, "__index__") or index(step) < 0:
        message = f"a training step is a whole number from 0 on, not {step!r}"
        raise PeftcError(Diagnostic("P545", message, help="peftc.step(model, 1), one more each time"))
    step = index(step)
    groups: dict[tuple[str, str | None], list[tuple[str, BudgetModule]]] = {}
    others: list[tuple[str, FormModule]] = []
    for name, form in forms_of(model, record):
        if isinstance(form, BudgetModule):
            if form.has_budget:
                groups.setdefault((name.partition("/")[0], task_of(name, record)), []).append((name, form))
        elif type(form).after_step is not FormModule.after_step:
            others.append((name, form))
    trained = {key for key, group in groups.items() if any(form.is_trained() for _, form in group)}
    rounds: list[list[BudgetModule]] = []
    for (edit, task), group in groups.items():
        forms = [form for _, form in group]
        ended = step > forms[0].last_round and is_finished(forms)
        if not ended and task is not None and (edit, task) not in trained and any(name == edit for name, _ in trained):
            continue  # the batch had no examples of the task
        missing = [name for name, form in group if not form.has_gradients()]
        if missing and (step < forms[0].last_round or not (is_finished(forms) or is_smoothed(forms))):
            message = f"`{edit}` has no gradients at {missing[0]}, on which importances depend"
            raise PeftcError(Diagnostic("P539", message, help="call `peftc.step` before `optimizer.zero_grad()`"))
        rounds.append(forms)
    with Deferral():
        for name, form in others:
            form.after_step(seeded(f"{record.owner(name.partition('/')[0]).seed}/{name}/{step}"))
        for forms in rounds:
            allocate(forms, step)


def losses(
    model: nn.Module, *, inputs: Mapping[str, Any] | None = None, logits: Tensor | None = None
) -> dict[str, Tensor]:
    """The terms that methods add to the loss, by name. The training loop adds them.

    - `<edit>.orthogonality` of an `svd`: w · mean of ‖PᵀP − I‖ and ‖QQᵀ − I‖ (Frobenius), as in
      PEFT.
    - `<edit>.l0` of a `masked`: penalty · the expected number of nonzero entries, until
      `peftc.calibrate` prunes.
    - `<edit>.NAME` of a form with a line `loss_NAME = …`, such as the `identity` of a `fusion`:
      penalty · Σ ‖I − V‖².
    - `consistency` of all forms with random numbers, such as `mixture`: (KL(p‖p') + KL(p'‖p)) / 2
      of `logits` and those of a second forward with other numbers. It needs both arguments.

    - what a Python form says that it adds (`FormModule.penalties`).

    The terms of an edit are over all sites, and of the current task.

    Args:
        model: a compiled model.
        inputs: the keyword arguments of the forward.
        logits: its logits.

    Shapes:
        logits: (…, classes)
        each term: ()

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P545 (other arguments).

    Source: PEFT (orthogonality); Guo et al. 2021, arXiv:2012.07463 (l0); AdapterHub (identity);
    Wang et al. 2022, arXiv:2205.12410, Eq. 5 (consistency).
    """
    record = active_installation(model)
    _check_forward(inputs, logits)
    penalties: dict[tuple[str, str], list[Tensor]] = {}
    random_forms: list[RandomModule] = []
    for name, form in forms_of(model, record):
        edit = name.partition("/")[0]
        if isinstance(form, RandomModule):
            random_forms.append(form)
        for term, value in form.penalties().items() if is_of_current_task(name, record) else ():
            penalties.setdefault((f"{edit}.{term}", form.reduction_of(term)), []).append(value)
    terms = {
        name: torch.stack(values).mean() if reduction == "mean" else torch.stack(values).sum()
        for (name, reduction), values in penalties.items()
    }
    if inputs is not None and logits is not None and random_forms:
        with drawn_anew(random_forms):
            other = model(**inputs).logits
        if other.shape != logits.shape:
            message = f"`logits` are {list(logits.shape)}, and those of these inputs {list(other.shape)}"
            raise PeftcError(Diagnostic("P545", message, help="pass the logits of the forward of `inputs`"))
        terms["consistency"] = consistency(logits, other)
    return terms


def _check_forward(inputs: Mapping[str, Any] | None, logits: Tensor | None) -> None:
    if inputs is not None and not isinstance(inputs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"`inputs` is a dictionary of the forward's arguments, not a {type(inputs).__name__}"
        raise PeftcError(Diagnostic("P545", message))
    if logits is not None and not (isinstance(logits, Tensor) and logits.is_floating_point() and logits.ndim > 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = f"{list(logits.shape)}, {logits.dtype}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`logits` are a tensor (…, classes) of floating-point numbers, not {kind}"
        raise PeftcError(Diagnostic("P545", message))


def consistency(logits: Tensor, others: Tensor) -> Tensor:
    """(KL(p‖p') + KL(p'‖p)) / 2, averaged over all but the classes: Wang et al. 2022, Eq. 5."""
    p, q = F.log_softmax(logits.flatten(0, -2), -1), F.log_softmax(others.flatten(0, -2), -1)
    one, other = (F.kl_div(a, b, reduction="batchmean", log_target=True) for a, b in ((p, q), (q, p)))
    return (one + other) / 2


class StepCallback(TrainerCallback):
    """Calls `peftc.step` in a Hugging Face `Trainer`, after each step of the optimizer.

    `Trainer(…, callbacks=[peftc.StepCallback()])`
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step(getattr(model, "module", model), state.global_step)


def forms_of(model: nn.Module, record: Installation) -> Iterator[tuple[str, FormModule]]:
    """The forms that have parameters, by saved name. The forms of each task are separate."""
    for name, where in record.form_modules.items():
        form = cast(FormModule, model.get_submodule(where))
        if isinstance(form, Tasked):
            yield from ((f"{name}.tasks.{task}", form.form(task)) for task in form.tasks)
        else:
            yield name, form


def is_of_current_task(name: str, record: Installation) -> bool:
    return record.task.concerns(task_of(name, record))


def task_of(name: str, record: Installation) -> str | None:
    place, _, key = name.rpartition("/")
    task = key.partition(".tasks.")[2] or place.rpartition(".tasks.")[2]  # the latter for a shared form
    return task if task in record.task.names else None
