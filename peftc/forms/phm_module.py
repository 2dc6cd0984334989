"""Bottlenecks whose weights are sums of Kronecker products, as modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.arguments import number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.module import FormModule

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class Rules(FormModule):
    """The Aᵢ of all projections of all sites: A (n, n, n)."""

    A: nn.Parameter


class PHMModule(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up, W = Σᵢ Aᵢ ⊗ (Lᵢ Rᵢ), without forming W; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); A (n, n, n); of a projection a → b: left (n, a/n, rank) and
    right (n, rank, b/n), or one matrix (n, a/n, b/n).
    Source: Mahabadi et al. 2021, arXiv:2106.04647, Eq. 4-6; first values as AdapterHub has them: A N(0, 1e-4), L and R
    Glorot uniform.
    """

    down_bias: nn.Parameter | None
    up_bias: nn.Parameter | None

    def setup(self) -> None:
        self.act, self.p = str(self.form_args["act"]), number(self.form_args, "dropout")

    def rule(self, name: str) -> Tensor:
        own = self.owner_module
        return own.A if isinstance(own, Rules) else self.get_parameter("A" if self.form_args["shared"] else f"{name}_A")

    def projected(self, name: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """x W + b: with x as n rows, row b of x W is Σᵢ Σₐ Aᵢ[a, b] x[a] Lᵢ Rᵢ."""
        a = self.rule(name)
        rows = x.unflatten(-1, (a.shape[0], -1))
        if self.form_args["factorised"]:
            z = torch.einsum("...ac,ick->...iak", rows, self.get_parameter(f"{name}_left"))
            z = torch.einsum("iab,...iak->...ibk", a, z)
            y = torch.einsum("...ibk,ikd->...bd", z, self.get_parameter(f"{name}_right"))
        else:
            z = torch.einsum("iab,...ac->...ibc", a, rows)
            y = torch.einsum("...ibc,icd->...bd", z, self.get_parameter(f"{name}_whole"))
        y = y.flatten(-2)
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.rule("down").dtype)
        z = ACTIVATION[self.act](self.projected("down", z, self.down_bias))
        return self.projected("up", F.dropout(z, self.p, self.training), self.up_bias).to(x.dtype)

    def matrix(self, name: str) -> Tensor:
        """W as `nn.Linear` has it, (out, in)."""
        a = self.rule(name)
        if self.form_args["factorised"]:
            inner = self.get_parameter(f"{name}_left") @ self.get_parameter(f"{name}_right")
        else:
            inner = self.get_parameter(f"{name}_whole")
        return torch.einsum("iab,icd->acbd", a, inner).flatten(2).flatten(0, 1).t().detach()

    def fold(self, value: Affine) -> Affine:
        return value.through(self.matrix("down"), self.down_bias).through(self.matrix("up"), self.up_bias)
