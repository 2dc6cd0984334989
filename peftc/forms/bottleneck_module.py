"""Bottlenecks whose weights are made or chosen, as modules, and their activations as functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import number
from peftc.forms.module import FormModule

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

ACTIVATION: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "none": lambda z: z,
}
EPSILON = 1e-5  # of the layer norms, as in nn.LayerNorm


class Projections(NamedTuple):
    """Of a bottleneck. Shapes: down (r, d_in); up (d_out, r); down_bias (r,); up_bias (d_out,)."""

    down: Tensor
    up: Tensor
    down_bias: Tensor | None
    up_bias: Tensor | None


class BottleneckModule(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out).
    """

    def projections(self, training: bool) -> Projections:
        """The present weights and biases."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        down, up, down_bias, up_bias = self.projections(self.training)
        z = ACTIVATION[str(self.form_args["act"])](F.linear(x.to(down.dtype), down, down_bias))
        z = F.dropout(z, number(self.form_args, "dropout"), self.training)
        return F.linear(z, up, up_bias).to(x.dtype)

    def fold(self, value: Affine) -> Affine:
        down, up, down_bias, up_bias = self.projections(False)
        return value.through(down, down_bias).through(up, up_bias)
