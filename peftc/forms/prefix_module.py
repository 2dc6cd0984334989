"""Trained keys and values: direct rows for one site, or an MLP that makes the rows of all sites of a group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftc.forms.module import FormModule, Pair
from peftc.forms.shapes import KeyValue


class PrefixModule(FormModule):
    """f = (P_k, P_v), for every example of the batch.

    Shapes: key, value (kv_heads, len, d_head or d_value); each part of f has the batch before.
    Source: Li and Liang 2021, arXiv:2101.00190.
    """

    key: nn.Parameter
    value: nn.Parameter

    def forward(self, like: Tensor) -> Pair:
        return _spread(self.key, like), _spread(self.value, like)

    def takes_rows(self) -> bool:
        return True


class PrefixGroup(FormModule):
    """(P_k, P_v) of layer i = rows 2i and 2i + 1 of tanh(E W + b) W' + b', for the n layers of a group.

    E starts as N(0, 1), the rest as in `nn.Linear`: the first values of Li and Liang, PEFT and AdapterHub.
    Shapes: embedding (len, d_model); down (m, d_model); up (n · kv_heads · (d_head + d_value), m).
    Source: Li and Liang 2021, arXiv:2101.00190, section 4.3.
    """

    embedding: nn.Parameter
    down: nn.Parameter
    down_bias: nn.Parameter
    up: nn.Parameter
    up_bias: nn.Parameter

    def setup(self) -> None:
        target = self.form_dims.target
        assert isinstance(target, KeyValue)
        self.heads, self.widths = target.kv_heads, target.widths

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


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    rows = rows.to(like.dtype)
    return rows if rows.ndim == 4 else rows.unsqueeze(0).expand(like.shape[0], -1, -1, -1)
