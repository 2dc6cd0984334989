"""Bottlenecks whose weights are sums of Kronecker products, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import integer, number
from peftc.forms.bottleneck_module import ACTIVATION
from peftc.forms.module import Draw, FormModule, constant, normal
from peftc.forms.phm import sizes
from peftc.forms.registry import Args, Dims

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine

SPREAD = 1e-4  # deviation of the first values of the Aᵢ


class Rules(FormModule):
    """The Aᵢ of all projections of all sites: A (n, n, n)."""

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        n = integer(args, "n")
        self.A = self.parameter("A", n, n, n)

    def draws(self) -> Mapping[str, Draw]:
        return {"A": normal(SPREAD)}


class PHM(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up, W = Σᵢ Aᵢ ⊗ (Lᵢ Rᵢ), without forming W; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); A (n, n, n); of a projection a → b: left (n, a/n, rank) and
    right (n, rank, b/n), or one matrix (n, a/n, b/n).
    Source: Mahabadi et al. 2021, arXiv:2106.04647, Eq. 4-6; first values as AdapterHub has them: A N(0, 1e-4), L and R
    Glorot uniform.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        d_in, r, d_out = sizes(args, dims)
        n, rank = integer(args, "n"), integer(args, "rank")
        for name, a, b in (("down", d_in, r), ("up", r, d_out)):
            self.optional(f"{name}_left", args["factorised"], n, a // n, rank)
            self.optional(f"{name}_right", args["factorised"], n, rank, b // n)
            self.optional(f"{name}_whole", not args["factorised"], n, a // n, b // n)
            self.optional(f"{name}_A", not args["shared"], n, n, n)
        self.down_bias = self.optional("down_bias", args["bias"], r)
        self.up_bias = self.optional("up_bias", args["bias"], d_out)
        self.act, self.p = str(args["act"]), number(args, "dropout")

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        return Rules(args, dims, dtype, device) if args["shared"] else cls(args, dims, dtype, device)

    def rule(self, name: str) -> Tensor:
        if isinstance(self.owner_module, Rules):
            return self.owner_module.A
        return self.get_parameter(f"{name}_A")

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

    def draws(self) -> Mapping[str, Draw]:
        drawn: dict[str, Draw] = {}
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                drawn[name] = constant(0.0)
            else:
                drawn[name] = normal(SPREAD) if name.endswith("_A") else glorot(*parameter.shape[1:])
        return drawn

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


def glorot(fan_in: int, fan_out: int) -> Draw:
    """U(-√(6 / (fan_in + fan_out)), …)."""
    bound = sqrt(6 / (fan_in + fan_out))
    return lambda values, generator: values.uniform_(-bound, bound, generator=generator)
