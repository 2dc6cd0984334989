"""Products of two thin matrices, as modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import features, integer, linear_features, number
from peftc.forms.lora import scale
from peftc.forms.module import Draw, FormModule, HiddenUnits, constant, kaiming, map_ids
from peftc.forms.registry import Args, Dims
from peftc.forms.rowwise_module import linear
from peftc.forms.shapes import Ids, Weight

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class LoRA(FormModule):
    """f(x) = scale · B (A dropout(x)), or `plus` + f(x); A Kaiming uniform, B zero.

    Shapes: x (batch, tokens, d_in), or ids (batch, tokens) < d_in for one-hot vectors; f (batch,
    tokens, d_out); A (r, d_in); B (d_out, r).
    Source: Hu et al. 2021, arXiv:2106.09685, Eq. 3.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        r, d_in = integer(args, "r"), linear_features("lora", dims.input)
        self.A = self.parameter("A", r, d_in)
        self.B = self.parameter("B", features("lora", dims.target, "writes"), r)
        self.scale = scale(args)
        self.p = number(args, "dropout")

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        a, b = self.A, self.B
        if isinstance(self.form_dims.input, Ids):
            z, dtype = map_ids(x, a, self.p if self.training else 0.0), a.dtype
        else:
            z, dtype = x if x.dtype == a.dtype else x.to(a.dtype), x.dtype
            if self.p and self.training:
                z = F.dropout(z, self.p)
            z = linear(z, a)
        if plus is not None:
            f = linear(z, b)
            if f.dtype == plus.dtype:
                return torch.add(plus, f, alpha=self.scale)
            return plus + (f * self.scale).to(plus.dtype)
        f = linear(z * self.scale, b)  # scaled where it is thin
        return f if f.dtype == dtype else f.to(dtype)

    def takes_rows(self) -> bool:
        return not isinstance(self.form_dims.input, Ids)

    def draws(self) -> Mapping[str, Draw]:
        return {"A": kaiming(self.A.shape[1]), "B": constant(0.0)}

    def fold(self, value: Affine) -> Affine:
        return value.through(self.A).through(self.B).scaled(self.scale)

    def hidden_units(self) -> HiddenUnits | None:
        return self.A, None, self.scale * self.B, None, "none"


class LowRank(FormModule):
    """f = scale · B A, a change of a weight; A Kaiming uniform, B zero.

    Shapes: f (out, in); A (r, in); B (out, r).
    Source: Hu et al. 2021, arXiv:2106.09685, Eq. 3.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        assert isinstance(dims.target, Weight)
        self.A = self.parameter("A", integer(args, "r"), dims.target.d_in)
        self.B = self.parameter("B", dims.target.d_out, integer(args, "r"))
        self.scale = scale(args)

    def forward(self, w: Tensor) -> Tensor:
        return (self.B @ self.A * self.scale).to(w.dtype)

    def draws(self) -> Mapping[str, Draw]:
        return {"A": kaiming(self.A.shape[1]), "B": constant(0.0)}
