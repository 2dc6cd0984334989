"""The module of a form whose equation has random numbers."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from peftc.concurrency.interrupts import shielded
from peftc.equation_code.code import ROUTE
from peftc.equation_code.module import EquationModule

UNDRAWN = -1


class RandomModule(EquationModule):
    """A form with `let i = random(n)`: `route` has its random numbers, (how many,).

    A step of training draws them (`peftc.step`); before the first one, each forward does.
    """

    def setup(self) -> None:
        super().setup()
        device = next(iter(self.tensors().values())).device
        self.register_buffer(
            ROUTE, torch.full((len(self.place.random_numbers),), UNDRAWN, device=device), persistent=False
        )

    def after_step(self, generator: torch.Generator) -> None:
        counts = map(self.place.random_count, self.place.random_numbers)
        numbers = [torch.randint(count, (), generator=generator) for count in counts]
        if numbers:
            self.get_buffer(ROUTE).copy_(torch.stack(numbers))


@shielded
def drawn_anew(forms: Sequence[RandomModule]) -> Generator[None]:
    """Inside the block each forward draws its random numbers anew."""
    routes = [form.get_buffer(ROUTE).clone() for form in forms]
    for form in forms:
        form.get_buffer(ROUTE).fill_(UNDRAWN)
    try:
        yield
    finally:
        for form, route in zip(forms, routes, strict=True):
            form.get_buffer(ROUTE).copy_(route)
