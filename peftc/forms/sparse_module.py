"""Changes of a few entries of weights and biases, as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from peftc.forms.arguments import changed_weight, size_of
from peftc.forms.module import FormModule, has_values, seeded
from peftc.forms.selective_module import SelectedValues
from peftc.forms.shapes import entries


class SparseValues(SelectedValues):
    """The trained entries of all sites of a `sparse`; the units are the entries of all sites, one site after the other.

    Shapes: values and places (k,).
    """

    def setup(self) -> None:
        self.total = self.form_dims.spread[1] or self.definition.entries(self.form_args, self.form_dims)
        self.select(len(self.values))
        self.bounds: dict[tuple[int, int], tuple[int, int]] = {}

    def after_load(self) -> None:
        super().after_load()
        self.bounds.clear()

    def within(self, start: int, count: int) -> Tensor:
        """The entries of a site, which begin at `start`; zero where they are not trained. Shape: (count,)."""
        first, last = self.between(start, start + count)
        where = self.get_buffer("places")[first:last] - start
        return self.values.new_zeros(count).index_put((where,), self.values[first:last])

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Which of the entries lie at places in [start, stop)."""
        if (start, stop) not in self.bounds:
            places = self.get_buffer("places")
            if not has_values(places):
                return 0, 0
            ends = torch.tensor([start, stop], device=places.device)
            first, last = torch.searchsorted(places, ends).tolist()
            self.bounds[start, stop] = (first, last)
        return self.bounds[start, stop]

    def fix(self, place: str) -> None:
        if self.criterion != "random" or not has_values(self.values):
            return
        generator, found = seeded(f"{self.form_args['seed']}/places"), torch.empty(0, dtype=torch.int64)
        while len(found) < len(self.values):  # drawn anew until there are enough different ones
            more = torch.randint(self.total, (2 * (len(self.values) - len(found)),), generator=generator)
            found = torch.cat([found, more]).unique()
        found = found[torch.randperm(len(found), generator=generator)[: len(self.values)]]
        self.choose(found)


class SparseModule(FormModule):
    """f = D, zero but at the chosen entries of this site.

    Shapes: f as the weight (out, in) or the bias (d,) that it changes.
    Raises: P540 while training, where no entries have been chosen.
    Source: Sung et al. 2021, arXiv:2111.09839, Eq. 4; Ansell et al. 2022, arXiv:2110.07560.
    """

    def setup(self) -> None:
        self.size, self.start = size_of(changed_weight("sparse", self.form_dims)), self.form_dims.spread[0]

    def forward(self, like: Tensor) -> Tensor:
        owner = self.owner_module
        assert isinstance(owner, SparseValues)
        if self.training:
            owner.require_ready()
        return owner.within(self.start, entries(self.form_dims.target)).view(self.size).to(like.dtype)
