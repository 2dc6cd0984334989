"""A whole Linear, as a module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import features, linear_features, number
from peftc.forms.module import Draw, FormModule, constant, map_ids
from peftc.forms.registry import Args, Dims
from peftc.forms.rowwise_module import linear
from peftc.forms.shapes import Ids

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class Linear(FormModule):
    """f(x) = W dropout(x) + b, zero at first.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); weight (d_out, d_in); bias (d_out,).
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        d_out = features("linear", dims.target, "writes")
        self.weight = self.parameter("weight", d_out, linear_features("linear", dims.input))
        self.bias = self.optional("bias", args["bias"], d_out)
        self.p = number(args, "dropout")

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.form_dims.input, Ids):
            f = map_ids(x, self.weight, self.p if self.training else 0.0)
            return f if self.bias is None else f + self.bias
        return linear(F.dropout(x.to(self.weight.dtype), self.p, self.training), self.weight, self.bias).to(x.dtype)

    def takes_rows(self) -> bool:
        return not isinstance(self.form_dims.input, Ids)

    def draws(self) -> Mapping[str, Draw]:
        return {name: constant(0.0) for name, _ in self.named_parameters()}

    def fold(self, value: Affine) -> Affine:
        return value.through(self.weight, self.bias)
