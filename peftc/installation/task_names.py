"""The names of tasks that are asked for, and whether the model can have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.installation.compiled_model import has_tasks
from peftc.planning.planner import PlanResult

NAME = re.compile(r"[A-Za-z0-9_-]+")
_DICT = nn.ModuleDict()  # its attributes cannot be names of its modules


def task_names(tasks: Sequence[str] | None, present: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The tasks that are asked for, else those that the model has.

    Raises: P537 where they are no names, given twice, or others than the model has.
    """
    if tasks is None:
        return present
    names = (tasks,) if isinstance(tasks, str) or not isinstance(tasks, Iterable) else tuple(tasks)  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
    wrong = [n for n in names if not isinstance(n, str) or not NAME.fullmatch(n) or hasattr(_DICT, n)]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or not names:
        message = f"`{wrong[0]}` is no name of a task" if names else "no task is named"
        raise PeftcError(Diagnostic("P537", message, help="names are of letters, digits, `_` and `-`"))
    if len(set(names)) < len(names):
        raise PeftcError(Diagnostic("P537", f"a task is named twice: {join_names(names)}"))
    if present and names != present:
        message = f"the model has parameters for {join_names(present)}"
        raise PeftcError(Diagnostic("P537", message, help="add a task with `peftc.add_task`, or leave `tasks` out"))
    return names


def require_tasks(tasks: Sequence[str] | None, planned: PlanResult) -> None:
    """Raises: P537 where tasks are asked for and no edit is `per task`."""
    if tasks is not None and not has_tasks(planned):
        raise PeftcError(Diagnostic("P537", "`tasks` was given, but no edit is marked `per task`"))
