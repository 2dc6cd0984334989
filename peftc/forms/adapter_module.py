"""Bottlenecks with an activation, as modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.adapter import width
from peftc.forms.arguments import features, integer, number
from peftc.forms.module import Draw, FormModule, HiddenUnits, constant, projections
from peftc.forms.registry import Args, Dims
from peftc.forms.rowwise_module import layer_norm, linear
from peftc.forms.shapes import Heads, Rows

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


class Adapter(FormModule):
    """f(x) = act(x W_down + b_down) W_up + b_up, a layer norm before or after where asked; dropout follows act.

    Shapes: x (batch, tokens, d_in); f (batch, tokens, d_out); down (r, d_in); up (d_out, r).
    Source: Houlsby et al. 2019, arXiv:1902.00751; place of the dropout and `init=lora` as in the code of He et al. 2022.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        self.d_in = features("adapter", dims.input, "reads")
        self.d_out = features("adapter", dims.target, "writes")
        r = width(args, self.d_in)
        self.down = self.parameter("down", r, self.d_in)
        self.up = self.parameter("up", self.d_out, r)
        self.down_bias = self.optional("down_bias", args["bias"], r)
        self.up_bias = self.optional("up_bias", args["bias"], self.d_out)
        self.norm_in_weight = self.optional("norm_in_weight", args["norm_in"], self.d_in)
        self.norm_in_bias = self.optional("norm_in_bias", args["norm_in"], self.d_in)
        self.norm_out_weight = self.optional("norm_out_weight", args["norm_out"], self.d_out)
        self.norm_out_bias = self.optional("norm_out_bias", args["norm_out"], self.d_out)
        self.act = str(args["act"])
        self.p = number(args, "dropout")

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(self.down.dtype)
        if self.norm_in_weight is not None:
            assert self.norm_in_bias is not None
            z = layer_norm(z, self.norm_in_weight, self.norm_in_bias, EPSILON)
        z = ACTIVATION[self.act](linear(z, self.down, self.down_bias))
        y = linear(F.dropout(z, self.p, self.training), self.up, self.up_bias)
        if self.norm_out_weight is not None:
            assert self.norm_out_bias is not None
            y = layer_norm(y, self.norm_out_weight, self.norm_out_bias, EPSILON)
        return y.to(x.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        down, up = projections(str(self.form_args["init"]), self.d_in)
        drawn = {"down": down, "up": up}
        drawn |= {name: constant(0.0) for name, _ in self.named_parameters() if name.endswith("_bias")}
        return drawn | {name: constant(1.0) for name, _ in self.named_parameters() if name.endswith("_weight")}

    def fold(self, value: Affine) -> Affine:
        return value.through(self.down, self.down_bias).through(self.up, self.up_bias)

    def hidden_units(self) -> HiddenUnits | None:
        if self.norm_in_weight is not None or self.norm_out_weight is not None:
            return None
        return self.down, self.down_bias, self.up, self.up_bias, self.act


class Bottleneck(FormModule):
    """f(q) = act(q P_kᵀ) P_v in each head, no 1/√d and no biases; with `softmax`, over the r rows, the scores are divided by √d_head,
    as those of the attention are: a prefix without its gate (He et al. 2022, Table 4).

    Shapes: q (batch, heads, tokens, d_head) or (batch, tokens, heads, d_head), and so the value, as the target has it;
    keys, values (heads, r, d_head).
    Source: He et al. 2022, arXiv:2110.04366, section 3.3 and Eq. 10.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        assert isinstance(dims.target, Heads | Rows)
        size = (dims.target.heads, integer(args, "r"), dims.target.d_head)
        self.keys = self.parameter("keys", *size)
        self.values = self.parameter("values", *size)
        self.turn_in = isinstance(dims.input, Heads)
        self.turn_out = isinstance(dims.target, Heads)
        self.act = str(args["act"])
        self.p = number(args, "dropout")

    def forward(self, q: Tensor) -> Tensor:
        rows = (q.transpose(1, 2) if self.turn_in else q).to(self.keys.dtype)
        z = rows @ self.keys.mT
        z = (z / sqrt(self.keys.shape[-1])).softmax(-1) if self.act == "softmax" else ACTIVATION[self.act](z)
        y = F.dropout(z, self.p, self.training) @ self.values
        return (y.transpose(1, 2) if self.turn_out else y).to(q.dtype)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        keys, values = projections(str(self.form_args["init"]), self.keys.shape[-1])
        return {"keys": keys, "values": values}
