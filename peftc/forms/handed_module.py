"""States that the sites of a form hand from layer to layer, beside the model."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError

State = TypeVar("State")


class Handed(Generic[State]):
    """What is handed from layer to layer in the present forward, by task and place; `seen` tells forwards apart. Belongs to one
    model: copies and pickles begin without any.
    """

    def __init__(self) -> None:
        self.states: dict[str | None, dict[int, State]] = {}
        self.seen: dict[str | None, dict[int, Tensor]] = {}

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

    def check(self, task: str | None, place: int, h: Tensor, keep: bool, again: bool) -> None:
        """Raises: P421 where the states are not those of the forward of which a layer runs again. Known by the mean of each token of h,
        before anything is kept for gradients: a checkpoint stops as soon as it has all that it wants.

        `keep`: whether gradients may be asked for.
        """
        if torch.compiler.is_compiling():
            return
        seen = self.seen.setdefault(task, {})
        if not keep:
            seen.pop(place, None)
        elif not again:
            seen[place] = h.detach().mean(-1)
        elif not alike(h.detach().mean(-1), seen.get(place)):
            message = "a layer runs again for its gradients, and another forward has run since"
            help_ = "call `backward` before the next forward, or train without gradient checkpointing"
            raise PeftcError(Diagnostic("P421", message, help=help_))


def alike(again: Tensor, before: Tensor | None) -> bool:
    """Whether a value that was computed twice is that of one forward, but for the order of sums."""
    if before is None or before.shape != again.shape:
        return False
    return not bool((again - before).norm() > 1e-2 * before.norm())  # what is not finite says nothing


def runs_again() -> bool:
    """Whether a layer is computed once more, for the gradients of a forward that is over."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # pyright: ignore


def lost_gradient(what: str) -> PeftcError:
    message = f"{what} has no gradient: this layer ran without gradients, and runs again for them"
    help_ = 'use `gradient_checkpointing_kwargs={"use_reentrant": False}`'
    return PeftcError(Diagnostic("P421", message, help=help_))
