"""Kronecker products of two small matrices, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import integer, number
from peftc.forms.kron import factors, scale
from peftc.forms.module import Draw, FormModule, constant, kaiming
from peftc.forms.registry import Args, Dims

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class Kron(FormModule):
    """f(x) = scale · (A ⊗ B) dropout(x), without forming the product; A zero, B Kaiming uniform.

    With x as (columns of A) × (columns of B): (A ⊗ B) x = A x Bᵀ.
    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); A (rows, columns); B (d_out / rows, d_in / columns), or
    B_up (d_out / rows, r) and B_down (r, d_in / columns).
    Source: Edalati et al. 2022, arXiv:2212.10650; first values as PEFT's LoKr has them.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        rows, columns, b_rows, b_columns = factors(args, dims)
        low = args["r"] is not None
        r = integer(args, "r") if low else 0
        self.A = self.parameter("A", rows, columns)
        self.B = self.optional("B", not low, b_rows, b_columns)
        self.B_up = self.optional("B_up", low, b_rows, r)
        self.B_down = self.optional("B_down", low, r, b_columns)
        self.scale = scale(args)
        self.p = number(args, "dropout")

    def forward(self, x: Tensor) -> Tensor:
        z = F.dropout(x.to(self.A.dtype), self.p, self.training).unflatten(-1, (self.A.shape[1], -1))
        if self.B is not None:
            z = F.linear(z, self.B)
        else:
            assert self.B_up is not None
            assert self.B_down is not None
            z = F.linear(F.linear(z, self.B_down), self.B_up)
        return (self.scale * (self.A @ z)).flatten(-2).to(x.dtype)

    def draws(self) -> Mapping[str, Draw]:
        columns = (self.B if self.B is not None else self.get_parameter("B_down")).shape[1]
        if self.B is not None:
            return {"A": constant(0.0), "B": kaiming(columns)}
        return {"A": constant(0.0), "B_up": kaiming(integer(self.form_args, "r")), "B_down": kaiming(columns)}

    def fold(self, value: Affine) -> Affine:
        if self.B is not None:
            b = self.B
        else:
            assert self.B_up is not None
            assert self.B_down is not None
            b = self.B_up @ self.B_down
        return value.through(torch.kron(self.A.detach(), b.detach())).scaled(self.scale)
