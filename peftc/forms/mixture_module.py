"""Bottlenecks of which one is chosen at random in training, as a module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peftc.forms.bottleneck_module import BottleneckModule, Projections
from peftc.forms.mixture import copies


class MixtureModule(BottleneckModule):
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
        self.copies = copies(self.form_args)
        self.register_buffer("route", torch.full((2,), -1, device=self.down.device), persistent=False)

    def after_step(self, generator: torch.Generator) -> None:
        chosen = torch.stack([torch.randint(count, (), generator=generator) for count in self.copies])
        self.get_buffer("route").copy_(chosen)

    def projections(self, training: bool) -> Projections:
        i, j = self.chosen() if training else (None, None)
        return Projections(
            self.one(self.down, i),
            self.one(self.up, j),
            None if self.down_bias is None else self.one(self.down_bias, i),
            None if self.up_bias is None else self.one(self.up_bias, j),
        )

    def chosen(self) -> tuple[Tensor, Tensor]:
        """The numbers of the down and of the up projection, (1,) each."""
        route = self.get_buffer("route")
        drawn = (torch.rand(2, device=route.device) * torch.tensor(self.copies, device=route.device)).long()
        route = torch.where(route < 0, drawn, route)
        return route[:1], route[1:]

    def one(self, whole: Tensor, index: Tensor | None) -> Tensor:
        return whole.mean(0) if index is None else whole.index_select(0, index)[0]

    def collapsed(self) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {name: parameter.mean(0) for name, parameter in self.named_parameters()}
