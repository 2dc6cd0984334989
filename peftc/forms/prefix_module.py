"""Trained keys and values: direct rows for one site, or an MLP that makes the rows of all sites of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.arguments import hidden_width, integer
from peftc.forms.module import Draw, FormModule, Pair, kaiming, normal
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import KeyValue


class Prefix(FormModule):
    """f = (P_k, P_v), for every example of the batch.

    Shapes: key, value (kv_heads, len, d_head or d_value); each part of f has the batch before.
    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        assert isinstance(dims.target, KeyValue)
        heads, length, d_head = dims.target.kv_heads, integer(args, "len"), dims.target.d_head
        self.key = self.parameter("key", heads, length, d_head)
        self.value = self.parameter("value", heads, length, dims.target.d_value or d_head)

    @classmethod
    def owner(cls, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> FormModule:
        made = cls if hidden_width(args) is None else PrefixGroup
        return made(args, dims, dtype, device)

    def forward(self, like: Tensor) -> Pair:
        return _spread(self.key, like), _spread(self.value, like)

    def takes_rows(self) -> bool:
        return True

    def draws(self) -> Mapping[str, Draw]:
        std = self.form_args["std"]
        draw = normal(0.02 if std is None else cast(float, std))
        return {"key": draw, "value": draw}


class PrefixGroup(FormModule):
    """(P_k, P_v) of layer i = rows 2i and 2i + 1 of tanh(E W + b) W' + b', for the n layers of a group.

    E starts as N(0, 1), the rest as in `nn.Linear`: the first values of Li and Liang, PEFT and AdapterHub.
    Shapes: embedding (len, d_model); down (m, d_model); up (n · kv_heads · (d_head + d_value), m).
    Source: Li and Liang 2021, arXiv:2101.00190, section 4.3.
    """

    def __init__(self, args: Args, dims: Dims, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__(args, dims, dtype, device)
        m = hidden_width(args)
        assert isinstance(dims.target, KeyValue)
        assert m is not None
        self.heads, self.widths = dims.target.kv_heads, dims.target.widths
        self.embedding = self.parameter("embedding", integer(args, "len"), dims.d_model)
        self.down = self.parameter("down", m, dims.d_model)
        self.down_bias = self.parameter("down_bias", m)
        self.up = self.parameter("up", dims.sites * sum(self.widths), m)
        self.up_bias = self.parameter("up_bias", dims.sites * sum(self.widths))

    def rows(self, index: int) -> Pair:
        """P_k and P_v of one site, (kv_heads, len, d_head or d_value), in the dtype of the parameters."""
        hidden = torch.tanh(F.linear(self.embedding, self.down, self.down_bias))
        width = sum(self.widths)
        mine = slice(index * width, (index + 1) * width)
        flat = F.linear(hidden, self.up[mine], self.up_bias[mine])
        key, value = (part.unflatten(1, (self.heads, -1)).transpose(0, 1) for part in flat.split(self.widths, 1))
        return key, value

    def value_at(self, index: int, like: Tensor) -> Pair:
        key, value = self.rows(index)
        return _spread(key, like), _spread(value, like)

    def collapsed_at(self, index: int) -> Mapping[str, Tensor]:
        with torch.no_grad():
            key, value = self.rows(index)
        return {"key": key.contiguous(), "value": value.contiguous()}

    def draws(self) -> Mapping[str, Draw]:
        d, m = self.down.shape[1], self.down.shape[0]
        return {
            "embedding": normal(1.0),
            "down": kaiming(d),
            "down_bias": kaiming(d),
            "up": kaiming(m),
            "up_bias": kaiming(m),
        }


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    rows = rows.to(like.dtype)
    return rows if rows.ndim == 4 else rows.unsqueeze(0).expand(like.shape[0], -1, -1, -1)
