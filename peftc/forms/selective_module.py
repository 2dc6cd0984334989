"""Forms that select what they train, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, has_values

UNCHOSEN = -1


class SelectiveModule(FormModule):
    """A form that selects what it trains: `peftc.calibrate` ranks units, and chooses the first ones.

    A unit is an entry, a row or a column, as the form has it.

    Attributes:
        scored: what the scores are of: the "weights" and biases that the form changes; its own
            values as if it had "all" of them, which it computes with while `dense` is set; or
            "nothing", if it ranks by itself.
        dense: all values, (total,), where scores are of them; None otherwise.
    """

    scored: Literal["weights", "all", "nothing"] = "weights"
    dense: Tensor | None = None

    @property
    def criterion(self) -> str:
        """How units are ranked: fisher, change, magnitude or snip; "value" by the form itself, "random" not at all."""
        return str(self.form_args["select"])

    @property
    def unit_count(self) -> int:
        """How many units it chooses."""
        raise NotImplementedError

    def first_values(self) -> Tensor:
        """All values as they start, (total,), where scores are of them."""
        raise NotImplementedError

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        """The score of each unit, (units,).

        Args:
            scores: of the entries of each weight or bias that the form changes, in the order of
                its sites; or of all its values, as one tensor; or none.
        """
        return torch.cat([s.reshape(-1) for s in scores])

    def choose(self, places: Tensor) -> None:
        """Trains the units of these numbers, (unit_count,), from now on."""
        raise NotImplementedError


class SelectedValues(SelectiveModule):
    """Values of units that are chosen once: `places` has their numbers in ascending order, -1 before they have been chosen.

    Shapes: places (k,).
    """

    values: nn.Parameter

    def select(self, count: int) -> None:
        """Makes room for the numbers of so many units."""
        self.state("places", torch.full((count,), UNCHOSEN, dtype=torch.int64, device=self.values.device))
        self.is_chosen = False  # known to be

    @property
    def unit_count(self) -> int:
        """How many units are trained."""
        return len(self.get_buffer("places"))

    def choose(self, places: Tensor) -> None:
        """Sets which units are trained; their values begin anew."""
        with torch.no_grad():
            self.get_buffer("places").copy_(places.sort()[0])
            self.begin()
        self.after_load()

    def begin(self) -> None:
        """Writes the first values of the chosen units."""
        self.values.zero_()

    def after_load(self) -> None:
        self.is_chosen = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_load()

    def require_ready(self) -> None:
        """Raises: P540 where nothing has been chosen."""
        if self.is_chosen:
            return
        places = self.get_buffer("places")
        if has_values(places) and int(places[0]) == UNCHOSEN:
            message = f"`{self.definition.name}(select={self.criterion})` has not chosen what is trained"
            raise PeftcError(Diagnostic("P540", message, help="peftc.calibrate(model, batches) chooses it"))
        self.is_chosen = True
