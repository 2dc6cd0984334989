"""The module of a form that selects what it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.initial_values import draw_at
from peftc.equation_code.module import EquationModule
from peftc.equations.values import Selection
from peftc.forms.module import Draw, Generators, has_values, seeded
from peftc.forms.selective_module import SelectiveModule

UNSELECTED = -1


class SelectionModule(EquationModule, SelectiveModule):
    """A form with `scatter(v, places, n)`: v and the numbers of its rows, or entries, in order.

    If sites select together, this is what they have in common, and places are numbered from one
    site to the next. A form without inputs is ranked by the weights that it changes, another one by
    its own parameter as if it had all entries (`dense`). The first values of v are those of these.
    Raises: P540 while training, where nothing has been selected.
    """

    def setup(self) -> None:
        super().setup()
        if self.selects:
            self.place_numbers.fill_(UNSELECTED)
        self.bounds: dict[tuple[int, int], tuple[int, int]] = {}  # of the places of a site
        self.origin = 0  # the seed of the first values
        self.is_selected = False  # known to be

    @property
    def selects(self) -> bool:
        """Whether the lines that select are there, with the arguments of the call."""
        return self.place.selection is not None

    @property
    def selection(self) -> Selection:
        assert self.place.selection is not None
        return self.place.selection

    @property
    def place_numbers(self) -> Tensor:
        return self.get_buffer(self.selection.places)

    @property
    def selected_parameter(self) -> nn.Parameter:
        """The selected values."""
        return getattr(self, self.selection.values)  # of a replica (`nn.DataParallel`), too

    @property
    def unit_total(self) -> int:
        """How many rows, or entries, there are to select from."""
        return (self.selection.together and self.form_dims.spread[1]) or self.selection.units

    def part(self, name: str, start: int, count: int) -> Tensor:
        """The values, or the places, of a site, which are numbered from `start` on."""
        is_value = name == self.selection.values
        if self.dense is not None:
            places = torch.arange(count, device=self.dense.device)
            return self.dense.narrow(self.selection.dimension, start, count) if is_value else places
        if not self.selection.together:
            return self.selected_parameter if is_value else self.place_numbers
        first, last = self.between(start, start + count)
        return self.selected_parameter[first:last] if is_value else self.place_numbers[first:last] - start

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the places are in [start, stop)."""
        if (start, stop) not in self.bounds:
            if not has_values(self.place_numbers):
                return 0, 0
            ends = torch.tensor([start, stop], device=self.place_numbers.device)
            first, last = torch.searchsorted(self.place_numbers, ends).tolist()
            self.bounds[start, stop] = (first, last)
        return self.bounds[start, stop]

    # First values

    @property
    def first_number(self) -> float | None:
        """What all values are at first; None if they are drawn."""
        return self.place.initial(self.place.parameters[self.selection.values])

    def draws(self) -> Mapping[str, Draw]:
        draws = super().draws()
        if not self.selects or self.first_number is not None:
            return draws
        return {name: draw for name, draw in draws.items() if name != self.selection.values}

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        super().initialise(generator, base)
        if self.selects and self.first_number is None:
            self.origin = generator(self.selection.values).initial_seed()
            if has_values(self.selected_parameter):
                with torch.no_grad():
                    self.selected_parameter.zero_()

    def first_values(self) -> Tensor:
        """The first values of all rows, or entries, drawn again."""
        size = list(self.selected_parameter.shape)
        size[self.selection.dimension] = self.unit_total
        values = torch.empty(size)
        draw = draw_at(self.place, self.selection.values)
        assert draw is not None
        draw(values, torch.Generator().manual_seed(self.origin))
        return values.to(self.selected_parameter)

    def fix(self, place: str) -> None:
        super().fix(place)
        if self.selects and self.criterion == "random" and has_values(self.selected_parameter):
            drawn = self.drawn_together() if self.selection.together else self.drawn_at(place)
            self.choose(drawn)

    def drawn_at(self, place: str) -> Tensor:
        generator = seeded(f"{self.form_args['seed']}/{place}/{self.selection.places}")
        return torch.randperm(self.unit_total, generator=generator)[: self.unit_count]

    def drawn_together(self) -> Tensor:
        generator = seeded(f"{self.form_args['seed']}/{self.selection.places}")
        drawn = torch.empty(0, dtype=torch.int64)
        while len(drawn) < self.unit_count:  # drawn anew until there are enough different ones
            more = torch.randint(self.unit_total, (2 * (self.unit_count - len(drawn)),), generator=generator)
            drawn = torch.cat([drawn, more]).unique()
        return drawn[torch.randperm(len(drawn), generator=generator)[: self.unit_count]]

    def sets_values(self) -> bool:
        return True

    # Selection

    @property
    def scored(self) -> Literal["weights", "all"]:  # pyright: ignore[reportIncompatibleVariableOverride]  # of the class there
        return "all" if self.place.inputs else "weights"

    @property
    def criterion(self) -> str:
        return str(self.form_args[self.selection.criterion]) if self.selects else "random"  # nothing is ranked

    @property
    def unit_count(self) -> int:
        return len(self.place_numbers)

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        if self.selection.together:
            return super().units(scores)
        return torch.stack([sums_along(score, self.selection.dimension) for score in scores]).sum(0)

    def choose(self, places: Tensor) -> None:
        with torch.no_grad():
            self.place_numbers.copy_(places.sort()[0])
            if self.first_number is None:
                self.selected_parameter.copy_(
                    self.first_values().index_select(self.selection.dimension, self.place_numbers)
                )
            else:
                self.selected_parameter.fill_(self.first_number)
        self.after_load()

    def after_load(self) -> None:
        self.is_selected = False
        self.bounds.clear()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_load()

    def require_ready(self) -> None:
        """Raises: P540 where nothing has been selected."""
        if self.is_selected or not self.selects:
            return
        if has_values(self.place_numbers) and int(self.place_numbers[0]) == UNSELECTED:
            message = f"`{self.definition.name}(select={self.criterion})` has not chosen what is trained"
            raise PeftcError(Diagnostic("P540", message, help="peftc.calibrate(model, batches) chooses it"))
        self.is_selected = True


def sums_along(score: Tensor, dimension: int) -> Tensor:
    """The sum of each row, or column; a vector as it is."""
    others = [i for i in range(score.ndim) if i != dimension]
    return score.sum(others) if score.ndim > 1 else score
