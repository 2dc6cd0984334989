"""Changes of a few entries of weights and biases, as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.arguments import changed_weight, size_of
from peftc.forms.module import FormModule, has_values, seeded
from peftc.forms.selective_module import SelectiveModule
from peftc.forms.shapes import entries

UNCHOSEN = -1


def refuse_unchosen(form: str, way: str, places: Tensor) -> None:
    """Raises: P540 where nothing has been chosen."""
    if has_values(places) and int(places[0]) == UNCHOSEN:
        message = f"`{form}(select={way})` has not chosen what is trained"
        raise PeftcError(Diagnostic("P540", message, help="peftc.calibrate(model, batches) chooses it"))


class SparseValues(SelectiveModule):
    """The trained entries of all sites of a `sparse`. `places` says where they are among the entries of all sites, one site after the other, in
    ascending order; -1 before they have been chosen.

    Shapes: values and places (k,).
    """

    values: nn.Parameter

    def setup(self) -> None:
        self.total = self.form_dims.spread[1] or self.definition.entries(self.form_args, self.form_dims)
        places = torch.full(self.values.shape, UNCHOSEN, dtype=torch.int64, device=self.values.device)
        self.state("places", places)
        self.bounds: dict[tuple[int, int], tuple[int, int]] = {}
        self.is_chosen = False  # known to be

    def choose(self, places: Tensor) -> None:
        """Sets which entries are trained; their values begin anew."""
        with torch.no_grad():
            self.get_buffer("places").copy_(places.sort()[0])
        self.begin()
        self.after_load()

    def begin(self) -> None:
        """The first values of the chosen entries."""
        with torch.no_grad():
            self.values.zero_()

    def after_load(self) -> None:
        self.bounds.clear()
        self.is_chosen = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_load()

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

    @property
    def unit_count(self) -> int:
        """How many entries are trained."""
        return len(self.values)

    def require_ready(self) -> None:
        """Raises: P540 where no entries have been chosen."""
        if not self.is_chosen:
            refuse_unchosen(self.definition.name, self.criterion, self.get_buffer("places"))
            self.is_chosen = True

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
