"""Bottlenecks of which a part of the weights is trained, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.module import Draw, FormModule, Generators, constant, has_values, projections
from peftc.forms.pruned import SPARSE_ADAPTER, sizes
from peftc.forms.registry import Args, Dims
from peftc.forms.sparse_module import SparseValues

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class PrunedValues(SparseValues):
    """The trained entries of W_down and W_up of all sites; they begin with what all entries were drawn with.

    `dense`, where it is set, stands for all of them (total,): what is pruned is chosen by its gradient.
    """

    form = SPARSE_ADAPTER

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.origin = 0
        self.dense: Tensor | None = None

    def first(self) -> Tensor:
        """The first values of all entries (total,), drawn again."""
        drawn = torch.empty(self.total)
        draw, _ = projections(str(self.form_args["init"]), self.total)
        draw(drawn, torch.Generator().manual_seed(self.origin))
        return drawn.to(self.values)

    def begin(self) -> None:
        with torch.no_grad():
            self.values.copy_(self.first()[self.get_buffer("places")])

    def within(self, start: int, count: int) -> Tensor:
        return super().within(start, count) if self.dense is None else self.dense[start : start + count]

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        self.origin = generator("values").initial_seed()
        if has_values(self.values):
            with torch.no_grad():
                self.values.zero_()


class SparseAdapter(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up; the entries of both W that are not trained are zero, and dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); W_down (r, d_in) and W_up (d_out, r), in this order among the
    entries of a site.
    Raises: P540 while training, where no entries have been chosen.
    Source: He et al. 2022, arXiv:2210.04284, section 2: pruned at initialisation.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.d_in, self.r, self.d_out = sizes(args, dims)
        self.down_bias = self.optional("down_bias", args["bias"], self.r)
        self.up_bias = self.optional("up_bias", args["bias"], self.d_out)
        self.act, self.p, self.start = str(args["act"]), number(args, "dropout"), dims.spread[0]

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return PrunedValues(args, dims, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.weights()
        z = F.dropout(ACTIVATION[self.act](F.linear(x.to(down.dtype), down, self.down_bias)), self.p, self.training)
        return F.linear(z, up, self.up_bias).to(x.dtype)

    def weights(self) -> tuple[Tensor, Tensor]:
        """W_down (r, d_in) and W_up (d_out, r)."""
        owner = self.owner_module
        assert isinstance(owner, PrunedValues)
        if self.training:
            owner.require_chosen()
        down, up = owner.within(self.start, self.r * (self.d_in + self.d_out)).split(
            [self.r * self.d_in, self.d_out * self.r]
        )
        return down.view(self.r, self.d_in), up.view(self.d_out, self.r)

    def draws(self) -> Mapping[str, Draw]:
        return {name: constant(0.0) for name, _ in self.named_parameters()}

    def fold(self, value: Affine) -> Affine:
        down, up = self.weights()
        return value.through(down, self.down_bias).through(up, self.up_bias)
