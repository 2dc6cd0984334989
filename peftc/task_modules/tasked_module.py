"""Parameters once for each task: which of them act is chosen for a whole batch, or row by row."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from peftc.concurrency.context import NO_ADAPTER, ChoiceVar, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.forms.module import FormModule, Pair, has_values
from peftc.forms.sequence_module import Sequence as Positions
from peftc.forms.shapes import Vector, Weight
from peftc.modules.form_hooks import Hookable
from peftc.task_modules.stacked_module import Groups, StackedForms, Where, groups_of, owners_of_values

Axis = Literal["task", "adapter"]


@dataclass
class Chosen:
    """The tasks of a model, or the adapters attached to it, and what the present context has chosen
    among them. Held by all forms of the model that have parameters for each.
    """

    names: tuple[str, ...]
    variable: ChoiceVar = field(default_factory=ChoiceVar)
    axis: Axis = "task"

    @cached_property
    def names_of_rows(self) -> tuple[str, ...]:
        """The adapters that a row may have, or none."""
        return (*self.names, NO_ADAPTER)

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The place of each in `names_of_rows`."""
        return {name: number for number, name in enumerate(self.names_of_rows)}

    @property
    def present(self) -> str | Rows | None:
        """The task or adapter of the present batch, or of each of its rows.

        Raises: P534 for a task that has been dropped since it was chosen, P535 for rows numbered by
            other tasks.
        """
        if self.axis == "adapter":
            return self.variable.adapter or None
        task = self.variable.task
        if isinstance(task, Rows):
            if task.names is not self.names and task.names != self.names[: len(task.names)]:
                now = join_names(self.names)
                message = f"task_ids number the tasks {join_names(task.names)}, and the model now has {now}"
                raise PeftcError(Diagnostic("P535", message, help="choose again, after the change of tasks"))
            return task
        return task if task is None else self.of(task)

    def of(self, task: str) -> str:
        """Raises: P534 for a task that the model does not have."""
        if not isinstance(task, str) or task not in self.names:  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
            help_ = did_you_mean(task, self.names) or f"the model has {join_names(self.names)}"
            raise PeftcError(Diagnostic("P534", f"the model has no task `{task}`", help=help_))
        return task

    def concerns(self, task: str | None) -> bool:
        """Whether what belongs to `task` (to none of them, where it is None) is at work, as far as
        one task is present.
        """
        return task is None or not isinstance(self.present, str) or task == self.present

    def rows(self, tasks: Sequence[str] | Sequence[int] | Tensor) -> Rows:
        """The number of the task of each row, (batch,).

        Raises: P534 for unknown names, P535 for what are no numbers of tasks.
        """
        if not isinstance(tasks, Tensor):
            try:
                if isinstance(tasks, str | bytes | Mapping | Set):
                    raise TypeError
                numbers = [self.names.index(self.of(task)) if isinstance(task, str) else task for task in tasks]
                tasks = torch.as_tensor(numbers, dtype=None if numbers else torch.int64)
            except (TypeError, ValueError, RuntimeError):  # as torch and Python say that they are no numbers
                message = f"task_ids are whole numbers or names, one for each row; found {tasks!r}"
                raise PeftcError(Diagnostic("P535", message, help="peftc.task(model, name) is for all rows")) from None
        if tasks.ndim != 1 or tasks.dtype == torch.bool or tasks.is_floating_point() or tasks.is_complex():
            words = f"shape {tuple(tasks.shape)}, {str(tasks.dtype).removeprefix('torch.')}"
            raise PeftcError(Diagnostic("P535", f"task_ids are whole numbers (batch,), found {words}"))
        wrong = next((number for number in tasks.tolist() if not 0 <= number < len(self.names)), None)
        if wrong is not None:
            numbered = join_names([f"{i} ({name})" for i, name in enumerate(self.names)])
            raise PeftcError(Diagnostic("P535", f"there is no task number {wrong}", help=f"the tasks are {numbered}"))
        present = dict.fromkeys(self.names[number] for number in tasks.tolist())
        return Rows(tasks.long(), self.names, tuple(present))


class Tasked(Hookable, FormModule):
    """The form of the present task; in a batch of several, each row goes through that of its own.

    Owns the forms under `tasks.<task>`.
    """

    def __init__(self, chosen: Chosen, forms: Mapping[str, FormModule]) -> None:
        first = next(iter(forms.values()))
        super().__init__(first.definition, first.form_args, first.form_dims, (), torch.float32, None)
        self.tasks = nn.ModuleDict(forms)
        for form in forms.values():
            form.prepare()
        self.__dict__["chosen"] = chosen
        self.__dict__["names"] = tuple(forms)
        # Equal for equal names. A text has its hash, which a tuple computes at each look-up.
        self.__dict__["key"] = sys.intern(repr(self.names))
        self.__dict__["of_weight"] = isinstance(self.form_dims.target, Weight | Vector)
        self.stacked = StackedForms.of(forms)

    chosen: Chosen
    names: tuple[str, ...]
    key: str
    of_weight: bool
    sequence: Positions | None = None  # where the forms pick positions

    def _replicate_for_data_parallel(self) -> Any:
        replica: Any = super()._replicate_for_data_parallel()  # pyright: ignore[reportUnknownMemberType]
        vars(replica)["chosen"] = replace(self.chosen, variable=self.chosen.variable.fixed())
        return replica

    def form(self, task: str) -> FormModule:
        return cast(FormModule, self.tasks[task])

    def states(self) -> tuple[str, ...]:
        return tuple(f"tasks.{task}.{name}" for task in self.tasks for name in self.form(task).states())

    def forward(self, like: Tensor, *second: Tensor) -> Tensor | Pair:
        present = self.chosen.present
        if isinstance(present, Rows):
            return self.mixed(present, like, *second)
        return self.of_task(present, like)(like, *second)

    def added_to(self, h: Tensor, *inputs: Tensor) -> Tensor:
        """h plus the value; for rows of several tasks, in one operation less."""
        if is_dynamo_compiling():
            return super().added_to(h, *inputs)
        present = self.chosen.present
        if not isinstance(present, Rows):
            return self.of_task(present, inputs[0]).added_to(h, *inputs)
        return self.added_to_rows(self.groups(present, inputs[0]), h, *inputs)

    def added_to_own(self, h: Tensor, *inputs: Tensor) -> Tensor:
        """The same in the rows whose adapter has this edit, h in the others."""
        present = self.chosen.present
        if is_dynamo_compiling() or not isinstance(present, Rows):
            return self.own_rows(self.added_to(h, *inputs), h)
        groups = self.groups(present, inputs[0])
        new = self.added_to_rows(groups, h, *inputs)
        return self.own_rows(new, h) if groups.others else new

    def added_to_rows(self, groups: Groups, h: Tensor, *inputs: Tensor) -> Tensor:
        stacked, like = self.stacked, inputs[0]
        if stacked is not None and groups.calls > 1 and stacked.is_cheap(groups, like):
            forms = vars(vars(self)["_modules"]["tasks"])["_modules"]  # faster than `getattr` of a module
            result = stacked.sum([forms[name] for name in groups.names], h, *inputs)
            if result is not None:
                return result
        form = self.of_rows(groups, like)
        return h + cast(Tensor, self.task_by_task(groups, *inputs)) if form is None else form.added_to(h, *inputs)

    def of_task(self, present: str | None, like: Tensor) -> FormModule:
        """The form of the present task."""
        if present is None and len(self.tasks) > 1 and has_values(like):
            axis = self.chosen.axis
            help_ = f'with peftc.{axis}(model, "{self.names[0]}"): …'
            message = f"the model has parameters for {len(self.tasks)} {axis}s, and none is chosen"
            raise PeftcError(Diagnostic("P533", message, help=help_))
        return self.form(present or self.names[0])

    def mixed(self, rows: Rows, like: Tensor, *second: Tensor) -> Tensor | Pair:
        """The value of rows of different tasks."""
        if is_dynamo_compiling():
            return self.mixed_in_graph(rows, self.repeats(rows, like), like, *second)
        groups = self.groups(rows, like)
        form = self.of_rows(groups, like)
        return self.task_by_task(groups, like, *second) if form is None else form(like, *second)

    def own_rows(self, new: Tensor, old: Tensor) -> Tensor:
        """`new` in the rows whose adapter has this edit, `old` in the others."""
        rows = self.chosen.present
        if not isinstance(rows, Rows) or (not is_dynamo_compiling() and rows.all_have(self.names, self.key)):
            return new
        if is_dynamo_compiling():  # one graph for all batches of adapters with these edits
            repeats = self.repeats(rows, new)
            acts = torch.tensor([name in self.names for name in rows.names], device=new.device)
            mask = acts[rows.numbers.to(new.device).repeat_interleave(repeats)].view(-1, *[1] * (new.ndim - 1))
        else:
            mask = self.groups(rows, new).acts_on(new)
        return new if mask is None else torch.where(mask, new, old)

    def groups(self, rows: Rows, like: Tensor) -> Groups:
        """The rows of each task in a batch, sorted once for all sites. Raises: P536."""
        key = self.key, like.shape[0], self.of_weight
        groups: Groups | None = rows.groups.get(key)
        if groups is None:
            groups = rows.groups[key] = groups_of(rows, self.repeats(rows, like), self.names)
        return groups

    def repeats(self, rows: Rows, like: Tensor) -> int:
        """How often the batch has each example.

        Raises: P536 for a batch of other examples, or where the edit is of a weight.
        """
        axis = self.chosen.axis
        if self.of_weight:
            message = f"a batch of several {axis}s has one weight: an edit of `w` or `b` cannot differ between its rows"
            raise PeftcError(Diagnostic("P536", message, help=f"choose one {axis} for the batch, or edit `h`"))
        count = rows.numbers.shape[0]
        if not count or like.shape[0] % count:
            argument = "rows" if axis == "adapter" else "task_ids"
            message = f"`{argument}` has {count} entries, and the batch of this call has {like.shape[0]} rows"
            raise PeftcError(Diagnostic("P536", message, help="one entry for each row"))
        return like.shape[0] // count

    def of_rows(self, groups: Groups, like: Tensor) -> FormModule | None:
        """One form for all rows: that of their task, or of parameters stacked, one for each row.

        None where the forms do not allow it, or a call of the form for each task is cheaper.
        """
        forms = vars(vars(self)["_modules"]["tasks"])["_modules"]
        if groups.calls == 1:
            return forms[groups.names[0]]
        if self.stacked is None or not self.stacked.is_cheap(groups, like):
            return None
        return self.stacked.joined([forms[name] for name in groups.names], like)

    def mixed_in_graph(self, rows: Rows, repeats: int, like: Tensor, *second: Tensor) -> Tensor | Pair:
        """The same under `torch.compile`. A graph should serve all batches: it takes the tasks of
        the rows as a tensor.
        """
        forms = [self.form(name) for name in self.names]
        if self.stacked is None or not self.stacked.applies(owners_of_values(forms), like):
            return task_by_task(self, rows, repeats, like, *second)
        numbers = rows.numbers.to(like.device).repeat_interleave(repeats)
        if rows.names != self.names:
            own = [self.names.index(name) if name in self.names else 0 for name in rows.names]
            numbers = torch.tensor(own, device=like.device)[numbers]
        return self.stacked.gather(forms, numbers, like)

    def task_by_task(self, groups: Groups, like: Tensor, *second: Tensor) -> Tensor | Pair:
        """The form of each task that the batch has, on its rows."""
        places, order = groups.on(like)
        values: list[tuple[int, Tensor | Pair]] = []
        for (task, rows), where in zip(groups.by_task.items(), places, strict=True):
            with self.at_rows(where):
                inputs = [one[where] for one in (like, *second)]
                values.append((len(rows), self.form(task)(*inputs)))
        if isinstance(values[0][1], tuple):
            key, value = (self.joined([(count, part[i]) for count, part in values], order, 4) for i in (0, 1))
            return key, value
        return self.joined(cast("list[tuple[int, Tensor]]", values), order, like.ndim)

    def at_rows(self, where: Where) -> AbstractContextManager[None]:
        return nullcontext() if self.sequence is None else self.sequence.narrowed(where)

    def joined(self, parts: list[tuple[int, Tensor]], order: Tensor | None, ndim: int) -> Tensor:
        """The values of all rows in their order. Without an input, a task has one for all its rows,
        with fewer dimensions.
        """
        values = [value for _, value in parts]
        if self.form_dims.input is None:
            values = [
                value.view(*[1] * (ndim - value.ndim), *value.shape).expand(count, *[-1] * (ndim - 1))
                for count, value in parts
            ]
        whole = torch.cat(values)
        return whole if order is None else whole.index_select(0, order)


# Dynamo shows the reason if the user compiles with `fullgraph=True`.
@cast(Any, torch.compiler.disable)(
    reason="a form whose parameters cannot be stacked runs once for each task of a batch"
)
def task_by_task(form: Tasked, rows: Rows, repeats: int, like: Tensor, *second: Tensor) -> Tensor | Pair:
    """`Tasked.task_by_task`, called by compiled code."""
    return form.task_by_task(groups_of(rows, repeats, form.names), like, *second)
