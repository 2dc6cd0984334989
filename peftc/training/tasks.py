"""Tasks of a compiled model: choosing one, or one for each row of a batch; adding and dropping."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from peftc.concurrency.context import Choice, ChoiceBlock
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.completeness import active_installation, complete_installation
from peftc.installation.contents import parameters, reload_forms, states
from peftc.installation.record import installation_of
from peftc.installation.spec_names import task_names


def tasks(model: nn.Module) -> tuple[str, ...]:
    """The tasks that a model has parameters for, in the order of their numbers.

    Empty without an edit `per task`.

    Args:
        model: a compiled model.

    Raises:
        PeftcError: P410 (not compiled).
    """
    return installation_of(model).task.names


def task(
    model: nn.Module, name: str | None = None, *, task_ids: Sequence[str] | Sequence[int] | Tensor | None = None
) -> ChoiceBlock:
    """Inside the block the model works for one task, or for one in each row of a batch.

    Rows of several tasks go through the edits of their own tasks in one forward. What the tasks
    have in common, and the base, is computed for all at once; so is what the tasks have of their
    own, with stacked parameters, where the form allows it. `generate` may repeat rows (beams).
    An edit of a weight is one for the whole batch. Blocks may stand in each other.

    The block acts in the present context: other threads and coroutines are not in it. To start a
    thread inside of it, use `contextvars.copy_context().run`. A copy of the model has no block.

    Args:
        model: a compiled model.
        name: of one task.
        task_ids: a task for each row of the batch: numbers as `tasks` lists them, or names.

    Shapes:
        task_ids: (batch,), a tensor or a sequence

    Returns:
        A context manager.

    Raises:
        PeftcError: P410 (not compiled), P431 (the block is left in another context), P436 (an
            edited module was replaced), P534 (unknown task), P535 (`task_ids` are no tasks, or
            neither or both of `name` and `task_ids` are there).
    """
    record = complete_installation(model)
    if (name is None) == (task_ids is None):
        raise PeftcError(Diagnostic("P535", "either one task is chosen by its name, or one for each row as `task_ids`"))
    if task_ids is None:
        return ChoiceBlock(model, record.choice, Choice(task=record.task.of(cast(str, name))))
    return ChoiceBlock(model, record.choice, Choice(task=record.task.rows(task_ids)))


def set_task(model: nn.Module, name: str | None) -> nn.Module:
    """Sets the task outside of `peftc.task` blocks.

    It is a property of the model, not of a context: all threads see it, and copies have it. Saved
    adapters do not.

    Args:
        model: a compiled model.
        name: of the task; None for no task.

    Returns:
        The model.

    Raises:
        PeftcError: P410 (not compiled), P436 (an edited module was replaced), P534 (unknown task).
    """
    record = complete_installation(model)
    record.choice.default = replace(record.choice.default, task=None if name is None else record.task.of(name))
    return model


def add_task(model: nn.Module, name: str, *, like: str | None = None) -> nn.Module:
    """Gives every edit `per task` parameters for one more task; those of the others stay.

    Args:
        model: a compiled model.
        name: of the new task.
        like: the task at whose present values the new parameters start; by default initial values.

    Returns:
        The model.

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P534 (unknown `like`), P537 (no name,
            the name of a task, or no edit `per task`). After an error the model is as it was.
    """
    record = active_installation(model)
    present = record.task.names
    task_names((*present, name))
    if not present:
        raise PeftcError(Diagnostic("P537", "no edit of the model is `per task`"))
    source = None if like is None else record.task.of(like)

    def copy_values(model: nn.Module) -> None:
        values = parameters(model) | states(model)
        own = re.compile(rf"(\.tasks\.){re.escape(name)}(?=[./])")
        with torch.no_grad():
            for saved, value in values.items():
                if own.search(saved):
                    value.copy_(values[own.sub(rf"\g<1>{source}", saved)])
        reload_forms(model)

    return CompiledModel(model).set_tasks((*present, name), None if source is None else copy_values)


def drop_task(model: nn.Module, name: str) -> nn.Module:
    """Takes the parameters of a task out of the model; those of the others stay as they are.

    Args:
        model: a compiled model.
        name: of the task.

    Returns:
        The model.

    Raises:
        PeftcError: P410 (not compiled), P529 (switched off), P534 (unknown task), P537 (it is the
            last task, or no edit is `per task`).
    """
    tasks = active_installation(model).task
    if not tasks.names:
        raise PeftcError(Diagnostic("P537", "no edit of the model is `per task`, so it has no task to drop"))
    rest = tuple(task for task in tasks.names if task != tasks.of(name))
    if not rest:
        help_ = "take the edits out with `peftc.remove`"
        raise PeftcError(Diagnostic("P537", f"`{name}` is the last task", help=help_))
    return CompiledModel(model).set_tasks(rest)
