"""States that the sites of a form hand from layer to layer, beside the model."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from peftc.diagnostics import Diagnostic, PeftcError

State = TypeVar("State")


class Handed(Generic[State]):
    """What is handed from layer to layer in the present forward, by task and place. Belongs to one model: copies and pickles begin
    without any.
    """

    def __init__(self) -> None:
        self.states: dict[str | None, dict[int, State]] = {}

    def __deepcopy__(self, memo: Any) -> Handed[State]:
        return Handed()

    def __reduce__(self) -> Any:
        return Handed, ()

    def before(self, task: str | None, place: int, again: bool) -> State | None:
        """The state that the layer below has handed on; None for the first of a forward. A layer that was dropped hands
        on what it was given.

        `again`: the layer is computed once more, for the gradients of a forward that is over.
        """
        states = self.states.setdefault(task, {})
        below: State | None = None
        other = place == 0
        for reached, state in states.items():  # in ascending order
            if reached < place:
                below = state
            else:
                other = True  # reached already: by another forward
        if again or not other:
            return below
        states.clear()
        return None


def runs_again() -> bool:
    """Whether a layer is computed once more, for the gradients of a forward that is over."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # pyright: ignore


def lost_gradient(what: str) -> PeftcError:
    message = f"{what} has no gradient: this layer ran without gradients, and runs again for them"
    help_ = 'use `gradient_checkpointing_kwargs={"use_reentrant": False}`'
    return PeftcError(Diagnostic("P421", message, help=help_))
