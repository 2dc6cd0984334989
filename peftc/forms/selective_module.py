"""Forms that select what they train, as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from peftc.forms.module import FormModule


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
