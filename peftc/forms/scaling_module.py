"""Factors, as modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from peftc.forms.arguments import features, number
from peftc.forms.module import Draw, FormModule, constant, normal
from peftc.forms.registry import Args, Dims
from peftc.forms.rowwise_module import linear
from peftc.forms.scaling import gates, vector_size
from peftc.forms.shapes import Heads, Rows


class Vector(FormModule):
    """f = l, one trained entry for each feature.

    Shapes: (d,) for hidden states and biases, (heads, d_head) for heads, (heads, 1, d_head) for q, k and v.
    Source: Liu et al. 2022, arXiv:2205.05638, section 3.3.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.scale = self.parameter("scale", *vector_size(dims.target))

    def forward(self, like: Tensor) -> Tensor:
        return self.scale.to(like.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        return {"scale": constant(number(self.form_args, "init"))}


class Scalar(FormModule):
    """f = s, one trained number, of shape (1,): a parameter without dimensions cannot be sharded.

    Source: He et al. 2022, arXiv:2110.04366, section 4.5.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.scale = self.parameter("scale", 1)

    def forward(self, like: Tensor) -> Tensor:
        return self.scale.to(like.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        return {"scale": constant(number(self.form_args, "init"))}


class Gate(FormModule):
    """f(x) = mean over tokens of σ(x w + b); of x without tokens, such as a pooled state, σ(x w + b).

    Shapes: x (batch, tokens, d) or (batch, d); f (batch, 1, 1), (batch, 1, 1, 1) where the target has heads, or (batch, 1);
    weight (1, d); bias (1,). With `rows`: f (batch, rows, 1), weight (rows, d), bias (rows,).
    Source: Mao et al. 2022, arXiv:2110.07577, section 3.2; as AdapterHub computes it, padding included. Rows: Zhang et al. 2023,
    arXiv:2305.15212, Eq. 2.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.weight = self.parameter("weight", gates(args), features("gate", dims.input, "reads"))
        self.bias = self.parameter("bias", gates(args))
        self.has_heads = isinstance(dims.target, Heads | Rows)

    def forward(self, x: Tensor) -> Tensor:
        g = torch.sigmoid(linear(x.to(self.weight.dtype), self.weight, self.bias))
        if x.ndim == 2:
            return g.to(x.dtype)
        g = g.mean(dim=1, keepdim=True)
        return (g.unsqueeze(-1) if self.has_heads else g.transpose(1, 2)).to(x.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        return {"weight": normal(0.02), "bias": constant(0.0)}
