"""The module of a form that reads values of other layers, and what sites have for those above."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.form_code import cross_layer_forward
from peftc.equation_code.module import EquationModule
from peftc.equations.words import HISTORY
from peftc.forms.module import FormModule

Values = tuple[Tensor, ...]  # of one site, for each call of `below` and `history`


class CrossLayerState:
    """What the sites of a form have for those above, in the present forward, by task and site, each
    with whether it has gradients; `inputs` tells forwards apart.

    Belongs to one model: copies and pickles begin without any.
    """

    def __init__(self) -> None:
        self.states: dict[str | None, dict[int, tuple[Values, bool]]] = {}
        self.inputs: dict[str | None, dict[int, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> CrossLayerState:
        return CrossLayerState()

    def __reduce__(self) -> Any:
        return CrossLayerState, ()

    def below(self, form: FormModule, h: Tensor) -> list[tuple[Values, bool]]:
        """What the sites below that of `form` have, from the lowest on.

        Args:
            h: its input.

        Raises: P421 where they are those of another forward.
        """
        again = runs_again()
        below = self.before(form.task, form.index, again)
        self.check(form.task, form.index, h, form.training or torch.is_grad_enabled(), again)
        return below

    def pass_on(self, form: FormModule, values: Values, below: list[tuple[Values, bool]]) -> None:
        """Keeps the values of a site for those above.

        Raises: P421 where the gradient of the values below is lost.
        """
        has_gradients = torch.is_grad_enabled()
        again = runs_again()
        if again and any(value.requires_grad for value in values) and not all(graph for _, graph in below):
            what = "this layer ran without gradients, and runs again for them"
            message = f"`{form.definition.name}` has no gradient: {what}"
            help_ = 'use `gradient_checkpointing_kwargs={"use_reentrant": False}`'
            raise PeftcError(Diagnostic("P421", message, help=help_))
        if form.index + 1 < form.form_dims.sites:
            if not again:
                # An output of the layer itself gets gradients afterwards, by a checkpoint.
                if has_gradients and not torch.compiler.is_compiling():
                    gather_for_gradients(values)
                values = values if has_gradients else tuple(value.detach() for value in values)
                self.states[form.task][form.index] = values, has_gradients
        elif not (form.training or has_gradients):
            self.states.pop(form.task, None)

    def before(self, task: str | None, site: int, again: bool) -> list[tuple[Values, bool]]:
        """What the sites below one have. A layer that was dropped is not among them.

        `again`: the layer is computed once more, for the gradients of a forward that is over.
        """
        states = self.states.setdefault(task, {})
        below = [values for reached, values in states.items() if reached < site]  # in ascending order
        if again or (site and len(below) == len(states)):
            return below
        states.clear()  # another forward has reached this site already
        return []

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


def gather_for_gradients(values: Values) -> None:
    """Lets FSDP2 gather the parameters of a layer when a gradient reaches what it has for those
    above. It does so by itself for the output of the layer alone, which may get its gradient later
    or none.
    """
    module = sharded_module()
    if module is not None:
        for value in values:
            if value.requires_grad:
                value.register_hook(lambda _: module.unshard())


def sharded_module() -> Any:
    """The innermost module that runs and whose parameters FSDP2 has sharded."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    frame = sys._getframe(1) if kind else None  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if isinstance(module := frame.f_locals.get("self"), kind):
            return module
        frame = frame.f_back
    return None


class CrossLayerModule(EquationModule):
    """A form with `below(s, first)`, `history(x)` or `top(out)`: the parameters of one site, or
    what sites have in common, and their values for those above.

    A value belongs to one token, so that a cache of keys and values changes nothing.
    Raises: P421 where the gradient would be lost on the way (checkpoints that run a layer without
        gradients first), or be that of another forward.
    """

    def setup(self) -> None:
        super().setup()
        if "common" in self.scopes:
            self.cross_layer_state = CrossLayerState()

    def prepare(self) -> None:
        for is_first in (True, False) if "site" in self.scopes else ():
            cross_layer_forward(self.place, self._owners, is_first)

    def forward(self, *inputs: Tensor) -> Tensor:
        owner = self.owner_module or self
        state = cast(CrossLayerState, owner.cross_layer_state)
        below = state.below(self, inputs[0])
        passed = self.read(below, inputs[0].device) if below else ()
        run = cross_layer_forward(self.place, self._owners, not below)
        result = run(self, *inputs[: self.arity or 1], *passed)
        value, values = cast("tuple[Tensor, Values]", result)
        state.pass_on(self, values, below)
        return value

    def added_to(self, h: Tensor, *inputs: Tensor) -> Tensor:
        return h + self(*inputs)

    def read(self, below: list[tuple[Values, bool]], device: torch.device) -> list[Tensor | Values]:
        """What each call reads: all values from below, or the last of them."""
        read: list[Tensor | Values] = []
        for i, call in enumerate(self.place.layer_calls):
            values = tuple(of_site[i].to(device) for of_site, _ in below)
            read.append(values if call.function == HISTORY else values[-1])
        return read
