"""Changes of whole rows or columns of weights, as modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.forms.module import Draw, FormModule, constant, has_values, seeded
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import Weight, entries
from peftc.forms.sparse import lines
from peftc.forms.sparse_module import UNCHOSEN, refuse_unchosen


class Lines(FormModule):
    """f = D, zero but in the chosen rows (columns); `places` are their numbers in ascending order, -1 before they have been chosen.

    Shapes: f as the weight (out, in) or the bias (d,) that it changes; values (k, in) or (out, k); (k,) for a bias; places (k,).
    Raises: P540 while training, where nothing has been chosen.
    Source: Vucetic et al. 2022, arXiv:2205.01541, section III: learner nodes.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        target = dims.target
        self.size = (target.d_out, target.d_in) if isinstance(target, Weight) else (entries(target),)
        self.dim = 0 if args["by"] == "row" else 1
        count, _ = lines(args, dims)
        self.values = self.parameter("values", *(count if i == self.dim else d for i, d in enumerate(self.size)))
        self.state("places", torch.full((count,), UNCHOSEN, dtype=torch.int64))
        self.chosen = False  # known to be

    @property
    def way(self) -> str:
        return str(self.form_args["select"])

    @property
    def count(self) -> int:
        """How many rows (columns) are trained."""
        return len(self.get_buffer("places"))

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        """The scores of all rows (columns), from those of the entries of the weights or biases that this changes."""
        return torch.stack([s.sum(1 - self.dim) if s.ndim == 2 else s for s in scores]).sum(0)

    def choose(self, places: Tensor) -> None:
        """Sets which rows (columns) are trained; their values begin with zero again."""
        with torch.no_grad():
            self.get_buffer("places").copy_(places.sort()[0])
            self.values.zero_()
        self.loaded()

    def loaded(self) -> None:
        self.chosen = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.loaded()

    def forward(self, like: Tensor) -> Tensor:
        places = self.get_buffer("places")
        if self.training and not self.chosen:
            refuse_unchosen("lines", self.way, places)
            self.chosen = True
        known = (places >= 0).view([-1 if i == self.dim else 1 for i in range(len(self.size))])
        zero = self.values.new_zeros(self.size)
        return zero.index_add(self.dim, places.clamp(min=0), self.values * known).to(like.dtype)

    def fix(self, place: str) -> None:
        if self.way == "random" and has_values(self.values):
            order = torch.randperm(self.size[self.dim], generator=seeded(f"{self.form_args['seed']}/{place}/places"))
            self.get_buffer("places").copy_(order[: self.count].sort()[0])

    def draws(self) -> Mapping[str, Draw]:
        return {"values": constant(0.0)}
