"""Bottlenecks of which a part of the weights is trained, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.activations_module import ACTIVATION
from peftc.forms.arguments import first_projections, number, width
from peftc.forms.module import FormModule, Generators, draw_of, has_values
from peftc.forms.sparse_module import SparseValues

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class PrunedValues(SparseValues):
    """The trained entries of W_down and W_up of all sites; they begin with what all entries were drawn with.

    `dense`, where it is set, stands for all of them (total,): what is pruned is chosen by its gradient.
    """

    scored = "all"

    def setup(self) -> None:
        super().setup()
        self.origin = 0
        self.dense = None

    def first_values(self) -> Tensor:
        """The first values of all entries (total,), drawn again."""
        drawn = torch.empty(self.total)
        first, _ = first_projections(self.form_args)
        draw_of(first, (self.total,))(drawn, torch.Generator().manual_seed(self.origin))
        return drawn.to(self.values)

    def begin(self) -> None:
        self.values.copy_(self.first_values()[self.get_buffer("places")])

    def within(self, start: int, count: int) -> Tensor:
        return super().within(start, count) if self.dense is None else self.dense[start : start + count]

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        self.origin = generator("values").initial_seed()
        if has_values(self.values):
            with torch.no_grad():
                self.values.zero_()


class SparseAdapterModule(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up; the entries of both W that are not trained are zero, and dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); W_down (r, d_in) and W_up (d_out, r), in this order among the
    entries of a site.
    Raises: P540 while training, where no entries have been chosen.
    Source: He et al. 2022, arXiv:2210.04284, section 2: pruned at initialisation.
    """

    down_bias: nn.Parameter | None
    up_bias: nn.Parameter | None

    def setup(self) -> None:
        form, args, dims = self.definition, self.form_args, self.form_dims
        self.d_in, self.d_out = form.read_features(dims), form.written_features(dims)
        self.r = width(args, self.d_in, form.name)
        self.start = dims.spread[0]

    def weights(self, training: bool) -> tuple[Tensor, Tensor]:
        """The present W_down and W_up."""
        owner = self.owner_module
        assert isinstance(owner, PrunedValues)
        if training:
            owner.require_ready()
        down, up = owner.within(self.start, self.r * (self.d_in + self.d_out)).tensor_split([self.r * self.d_in])
        return down.view(self.r, self.d_in), up.view(self.d_out, self.r)

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.weights(self.training)
        z = ACTIVATION[str(self.form_args["act"])](F.linear(x.to(down.dtype), down, self.down_bias))
        z = F.dropout(z, number(self.form_args, "dropout"), self.training)
        return F.linear(z, up, self.up_bias).to(x.dtype)

    def fold(self, value: Affine) -> Affine:
        down, up = self.weights(training=False)
        return value.through(down, self.down_bias).through(up, self.up_bias)
