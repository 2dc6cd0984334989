"""Changes of a few entries of weights and biases, as modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import Draw, FormModule, constant, has_values, seeded
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import Weight, entries
from peftc.forms.sparse import SPARSE, chosen

UNCHOSEN = -1


def refuse_unchosen(form: str, way: str, places: Tensor) -> None:
    """Raises: P540 where nothing has been chosen."""
    if has_values(places) and int(places[0]) == UNCHOSEN:
        message = f"`{form}(select={way})` has not chosen what is trained"
        raise PeftcError(Diagnostic("P540", message, help="peftc.calibrate(model, batches) chooses it"))


class SparseValues(FormModule):
    """The trained entries of all sites of a `sparse`. `places` says where they are among the entries of all sites, one site after the other, in
    ascending order; -1 before they have been chosen.

    Shapes: values and places (k,).
    """

    form = SPARSE

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.total = dims.spread[1] or self.form.entries(args, dims)
        count = chosen(args, self.total)
        self.values = self.parameter("values", count)
        self.state("places", torch.full((count,), UNCHOSEN, dtype=torch.int64, device=device))
        self.bounds: dict[tuple[int, int], tuple[int, int]] = {}
        self.chosen = False  # known to be

    def units(self, scores: Sequence[Tensor]) -> Tensor:
        """The scores of all entries, from those of the entries of each site."""
        return torch.cat([s.reshape(-1) for s in scores])

    def choose(self, places: Tensor) -> None:
        """Sets which entries are trained; their values begin anew."""
        with torch.no_grad():
            self.get_buffer("places").copy_(places.sort()[0])
        self.begin()
        self.loaded()

    def begin(self) -> None:
        """The first values of the chosen entries."""
        with torch.no_grad():
            self.values.zero_()

    def loaded(self) -> None:
        self.bounds.clear()
        self.chosen = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.loaded()

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
    def way(self) -> str:
        return str(self.form_args["select"])

    @property
    def count(self) -> int:
        """How many entries are trained."""
        return len(self.values)

    def require_chosen(self) -> None:
        """Raises: P540 where no entries have been chosen."""
        if not self.chosen:
            refuse_unchosen(self.form.name, self.way, self.get_buffer("places"))
            self.chosen = True

    def fix(self, place: str) -> None:
        if self.way != "random" or not has_values(self.values):
            return
        generator, found = seeded(f"{self.form_args['seed']}/places"), torch.empty(0, dtype=torch.int64)
        while len(found) < len(self.values):  # drawn anew until there are enough different ones
            more = torch.randint(self.total, (2 * (len(self.values) - len(found)),), generator=generator)
            found = torch.cat([found, more]).unique()
        found = found[torch.randperm(len(found), generator=generator)[: len(self.values)]]
        self.choose(found)

    def draws(self) -> Mapping[str, Draw]:
        return {"values": constant(0.0)}


class Sparse(FormModule):
    """f = D, zero but at the chosen entries of this site.

    Shapes: f as the weight (out, in) or the bias (d,) that it changes.
    Raises: P540 while training, where no entries have been chosen.
    Source: Sung et al. 2021, arXiv:2111.09839, Eq. 4; Ansell et al. 2022, arXiv:2110.07560.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        target = dims.target
        self.size = (target.d_out, target.d_in) if isinstance(target, Weight) else (entries(target),)
        self.start = dims.spread[0]

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return SparseValues(args, dims, dtype, device)

    def forward(self, like: Tensor) -> Tensor:
        owner = self.owner_module
        assert isinstance(owner, SparseValues)
        if self.training:
            owner.require_chosen()
        return owner.within(self.start, entries(self.form_dims.target)).view(self.size).to(like.dtype)
