"""Tasks of a compiled model: choosing one, or one for each row of a batch; adding and dropping them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from peftc.concurrency.context import Choice, ChoiceBlock, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.contents import parameters, states
from peftc.installation.presence import active_installation, complete_installation
from peftc.installation.record import installation_of
from peftc.installation.task_names import task_names


def tasks(model: nn.Module) -> tuple[str, ...]:
    """The tasks that a model has parameters for, in the order of their numbers; none without an edit `per task`.

    Raises: P410 for a model that is not compiled.
    """
    return installation_of(model).task.names


def task(
    model: nn.Module, name: str | None = None, *, task_ids: Sequence[str] | Sequence[int] | Tensor | None = None
) -> ChoiceBlock:
    """Inside the block the model works for one task, or for one in each row of a batch. Blocks may stand in each other.

    Rows of several tasks go through the edits of their own tasks in one forward; what is common to the tasks, and the base, is
    computed for all at once. `generate` may repeat rows (beams). An edit of a weight is one for the whole batch.

    The choice is that of the present context: other threads and coroutines have their own. A thread that is to have it is
    started with `contextvars.copy_context().run`. A copy of the model has no block.

    Args: `name`: of one task. `task_ids`: numbers of tasks (batch,), as `tasks` lists them, or their names; a tensor or a sequence.
    Raises: P410 (not compiled), P436 (an edited module was replaced), P534 (unknown), P535 (no numbers of tasks, or none and both
    given), P431 (left elsewhere).
    """
    record = complete_installation(model)
    if (name is None) == (task_ids is None):
        raise PeftcError(Diagnostic("P535", "either one task is chosen by its name, or one for each row as `task_ids`"))
    if task_ids is None:
        return ChoiceBlock(model, record.choice, Choice(task=record.task.of(cast(str, name))))
    return ChoiceBlock(model, record.choice, Choice(task=Rows(record.task.numbers(task_ids), record.task.names)))


def set_task(model: nn.Module, name: str | None) -> nn.Module:
    """The task that the model works for where no `peftc.task` block says another; none where `name` is None.

    It is a property of the model, not of a context: all threads see it, and copies have it. Saved adapters have not.

    Raises: P410 (not compiled), P436 (an edited module was replaced), P534 (unknown).
    """
    record = complete_installation(model)
    record.choice.default = replace(record.choice.default, task=None if name is None else record.task.of(name))
    return model


def add_task(model: nn.Module, name: str, *, like: str | None = None) -> nn.Module:
    """Gives every edit `per task` parameters for one more task; those of the others stay as they are.

    Args: `like`: the task whose present values the new parameters start with; initial values without it.
    Raises: P410 (not compiled), P529 (switched off), P534 (`like`), P537 (no name, a task that there is, no edit `per task`).
    After an error the model is as it was.
    """
    record = active_installation(model)
    present = record.task.names
    task_names((*present, name))
    if not present:
        raise PeftcError(Diagnostic("P537", "no edit of the model is `per task`"))
    source = None if like is None else record.task.of(like)

    @torch.no_grad()
    def copied(model: nn.Module) -> None:
        found = parameters(model) | states(model)
        own = re.compile(rf"(\.tasks\.){re.escape(name)}(?=[./])")
        for saved, value in found.items():
            if own.search(saved):
                value.copy_(found[own.sub(rf"\g<1>{source}", saved)])
        for module in model.modules():
            if isinstance(module, FormModule):
                module.loaded()

    compiled, tasks = CompiledModel(model), (*present, name)
    specs = compiled.replan(compiled.specs, tasks)
    return compiled.set_specs(specs, tasks=tasks, finish=None if source is None else copied)


def drop_task(model: nn.Module, name: str) -> nn.Module:
    """Takes the parameters of a task out of the model; those of the others stay as they are.

    Raises: P410 (not compiled), P529 (switched off), P534 (unknown), P537 for the last one, and where there is none.
    """
    chosen = active_installation(model).task
    if not chosen.names:
        raise PeftcError(Diagnostic("P537", "no edit of the model is `per task`, so it has no task to drop"))
    rest = tuple(task for task in chosen.names if task != chosen.of(name))
    if not rest:
        raise PeftcError(
            Diagnostic("P537", f"`{name}` is the last task", help="take the edits out with `peftc.remove`")
        )
    compiled = CompiledModel(model)
    return compiled.set_specs(compiled.replan(compiled.specs, rest), tasks=rest)
