"""Singular value decompositions of a change, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import features, integer, number
from peftc.forms.module import Draw, FormModule, constant, normal
from peftc.forms.registry import Args, Dims

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

EPSILON = 1e-5  # added to the rank, as PEFT does: all may be given up


class SVD(FormModule):
    """f(x) = alpha / (rank + 1e-5) · P (λ ⊙ (Q dropout(x))); P and Q N(0, 0.02), λ zero; alpha = r where none is given.

    `rank`, the number of λ that have not been given up, and the smoothed importances are a state that `peftc.step` changes.
    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); P (d_out, r); Q (r, d_in); values (r,).
    Source: Zhang et al. 2023, arXiv:2303.10512, Eq. 3; scale and first values as PEFT has them.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        r, d_in = integer(args, "r"), features("svd", dims.input, "reads")
        self.P = self.parameter("P", features("svd", dims.target, "writes"), r)
        self.Q = self.parameter("Q", r, d_in)
        self.values = self.parameter("values", r)
        self.rank = self.state("rank", torch.tensor([float(r)], dtype=dtype))
        self.alpha = float(r) if args["alpha"] is None else number(args, "alpha")
        self.p = number(args, "dropout")
        if args["target"] is not None:
            for name, parameter in list(self.named_parameters()):
                self.state(f"{name}_importance", torch.zeros(parameter.shape, dtype=dtype))
                self.state(f"{name}_uncertainty", torch.zeros(parameter.shape, dtype=dtype))

    def scale(self) -> Tensor:
        return self.alpha / (self.rank + EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        z = F.linear(F.dropout(x.to(self.P.dtype), self.p, self.training), self.Q)
        return (F.linear(z * self.values, self.P) * self.scale()).to(x.dtype)

    def draws(self) -> Mapping[str, Draw]:
        return {"P": normal(0.02), "Q": normal(0.02), "values": constant(0.0)}

    def fold(self, value: Affine) -> Affine:
        values = self.values.detach().to(value.dtype)
        return value.through(self.Q).scaled(values).through(self.P).scaled(self.scale().to(value.dtype))
