"""Bottlenecks of which one is chosen at random in training, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.arguments import number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.mixture import copies
from peftc.forms.module import FormModule

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class MixtureModule(FormModule):
    """f(x) = act(x W_down,i + b_i) W_up,j + b_j; i and j are `route` while training, and drawn anew in each forward where no step
    has set them. Otherwise W and b are the means over all bottlenecks.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); down (n, r, d_in); up (n, d_out, r); one in the place of n where
    it is shared; route (2,).
    Source: Wang et al. 2022, arXiv:2205.12410, section 3: stochastic routing, merged for inference.
    """

    down: nn.Parameter
    up: nn.Parameter
    down_bias: nn.Parameter | None
    up_bias: nn.Parameter | None

    def setup(self) -> None:
        args, device = self.form_args, self.down.device
        self.copies, self.act, self.p = copies(args), str(args["act"]), number(args, "dropout")
        self.register_buffer("route", torch.full((2,), -1, device=device), persistent=False)

    def after_step(self, generator: torch.Generator) -> None:
        chosen = torch.stack([torch.randint(count, (), generator=generator) for count in self.copies])
        self.get_buffer("route").copy_(chosen)

    def forward(self, x: Tensor) -> Tensor:
        i, j = self.chosen() if self.training else (None, None)
        z = F.linear(x.to(self.down.dtype), self.one(self.down, i), self.bias(self.down_bias, i))
        z = F.dropout(ACTIVATION[self.act](z), self.p, self.training)
        return F.linear(z, self.one(self.up, j), self.bias(self.up_bias, j)).to(x.dtype)

    def chosen(self) -> tuple[Tensor, Tensor]:
        """The numbers of the down and of the up projection, (1,) each."""
        route = self.get_buffer("route")
        drawn = (torch.rand(2, device=route.device) * torch.tensor(self.copies, device=route.device)).long()
        route = torch.where(route < 0, drawn, route)
        return route[:1], route[1:]

    def one(self, whole: Tensor, index: Tensor | None) -> Tensor:
        return whole.mean(0) if index is None else whole.index_select(0, index)[0]

    def bias(self, whole: Tensor | None, index: Tensor | None) -> Tensor | None:
        return None if whole is None else self.one(whole, index)

    def fold(self, value: Affine) -> Affine:
        down, up = self.one(self.down, None), self.one(self.up, None)
        return value.through(down, self.bias(self.down_bias, None)).through(up, self.bias(self.up_bias, None))

    def collapsed(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {name: parameter.mean(0) for name, parameter in self.named_parameters()}
