"""Changes of whole rows or columns of weights, as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peftc.forms.arguments import changed_weight, size_of
from peftc.forms.module import has_values, seeded
from peftc.forms.selective_module import SelectedValues


class LinesModule(SelectedValues):
    """f = D, zero but in the chosen rows (columns), which are the units.

    Shapes: f as the weight (out, in) or the bias (d,) that it changes; values (k, in) or (out, k); (k,) for a bias; places (k,).
    Raises: P540 while training, where nothing has been chosen.
    Source: Vucetic et al. 2022, arXiv:2205.01541, section III: learner nodes.
    """

    def setup(self) -> None:
        self.dim = 0 if self.form_args["by"] == "row" else 1
        self.size = size_of(changed_weight("lines", self.form_dims))
        self.select(self.values.shape[self.dim])

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        """The scores of all rows (columns), from those of the entries of the weights or biases that this changes."""
        return torch.stack([s.sum(1 - self.dim) if s.ndim == 2 else s for s in scores]).sum(0)

    def forward(self, like: Tensor) -> Tensor:
        places = self.get_buffer("places")
        if self.training:
            self.require_ready()
        known = (places >= 0).view([-1 if i == self.dim else 1 for i in range(len(self.size))])
        zero = self.values.new_zeros(self.size)
        return zero.index_add(self.dim, places.clamp(min=0), self.values * known).to(like.dtype)

    def fix(self, place: str) -> None:
        if self.criterion == "random" and has_values(self.values):
            order = torch.randperm(self.size[self.dim], generator=seeded(f"{self.form_args['seed']}/{place}/places"))
            self.choose(order[: self.unit_count])
