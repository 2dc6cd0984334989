"""States that pass from layer to layer beside the model: those of the sites of a form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule


class CrossLayerState:
    """The states of a form in the present forward, by task and site; `inputs` tells forwards apart.
    Belongs to one model: copies and pickles begin without any.
    """

    def __init__(self) -> None:
        self.states: dict[str | None, dict[int, tuple[Tensor, ...]]] = {}
        self.inputs: dict[str | None, dict[int, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> CrossLayerState:
        return CrossLayerState()

    def __reduce__(self) -> Any:
        return CrossLayerState, ()

    def below(self, form: FormModule, h: Tensor, has_gradient: bool, what: str) -> tuple[Tensor, ...]:
        """The state from the layer below, for the site of `form`; empty at the first of a forward.

        Args:
            h: its input.
            has_gradient: whether the state of this forward has gradients.
            what: the form, in a refusal.

        Raises: P421 where the gradient of the state is lost, or the state is that of another forward.
        """
        again = runs_again()
        below = self.before(form.task, form.index, again)
        if again and has_gradient and not all(state.requires_grad for state in below):
            message = f"{what} has no gradient: this layer ran without gradients, and runs again for them"
            help_ = 'use `gradient_checkpointing_kwargs={"use_reentrant": False}`'
            raise PeftcError(Diagnostic("P421", message, help=help_))
        self.check(form.task, form.index, h, form.training or torch.is_grad_enabled(), again)
        return below

    def pass_on(self, form: FormModule, *state: Tensor) -> bool:
        """Keeps the state for the layer above. False at the last site, which has none above."""
        if form.index + 1 < form.form_dims.sites:
            if not runs_again():
                self.states[form.task][form.index] = state
            return True
        if not (form.training or torch.is_grad_enabled()):
            self.states.pop(form.task, None)
        return False

    def before(self, task: str | None, site: int, again: bool) -> tuple[Tensor, ...]:
        """The state from below a site. One that a dropped layer did not change is that from below it.

        `again`: the layer is computed once more, for the gradients of a forward that is over.
        """
        states = self.states.setdefault(task, {})
        below: tuple[Tensor, ...] = ()
        other = site == 0
        for reached, state in states.items():  # in ascending order
            if reached < site:
                below = state
            else:
                other = True  # reached already: by another forward
        if again or not other:
            return below
        states.clear()
        return ()

    def check(self, task: str | None, site: int, h: Tensor, keep: bool, again: bool) -> None:
        """Raises: P421 where the states are not those of the forward of which a layer runs again.

        Known by the mean of each token of h, before anything is kept for gradients: a checkpoint
        stops as soon as it has all that it wants. `keep`: whether gradients may be asked for.
        """
        if torch.compiler.is_compiling():
            return
        inputs = self.inputs.setdefault(task, {})
        if not keep:
            inputs.pop(site, None)
        elif not again:
            inputs[site] = h.detach().mean(-1)
        elif not is_alike(h.detach().mean(-1), inputs.get(site)):
            message = "a layer runs again for its gradients, and another forward has run since"
            help_ = "call `backward` before the next forward, or train without gradient checkpointing"
            raise PeftcError(Diagnostic("P421", message, help=help_))


def is_alike(again: Tensor, before: Tensor | None) -> bool:
    """Whether a value computed twice is that of one forward, but for the order of sums."""
    if before is None or before.shape != again.shape:
        return False
    return not bool((again - before).norm() > 1e-2 * before.norm())  # what is not finite says nothing


def runs_again() -> bool:
    """Whether a layer is computed once more, for the gradients of a forward that is over."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # pyright: ignore
