"""Operations whose parameters may be those of all rows of a batch, or have a first dimension of rows.

A form that computes by these and by broadcasting can be given the parameters of several tasks at once, stacked: one
for each row (`FormModule.takes_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    Shapes: x (…, d_in); W (d_out, d_in); b (d_out,). Of rows with parameters of their own: x (rows,
    tokens, d_in); W (rows, d_out, d_in); b (rows, 1, d_out).
    """
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)


def stack(values: Sequence[Tensor], ndim: int) -> Tensor:
    """One value for each row, (rows, 1, …, *size): it broadcasts with a state of `ndim` dimensions as one value does."""
    return spread(torch.stack(tuple(values)), ndim)


def spread(stacked: Tensor, ndim: int) -> Tensor:
    """Values (rows, *size) as `stack` has them."""
    missing = ndim - stacked.ndim
    return stacked.view(len(stacked), *[1] * missing, *stacked.shape[1:]) if missing > 0 else stacked


def lookup(ids: Tensor, weight: Tensor, p: float = 0.0, training: bool = False) -> Tensor:
    """weight · onehot(ids), without the one-hot vectors; dropout of their one entry that is not 0.

    Shapes: ids (…); weight (d, count); the result (…, d).
    """
    rows = F.embedding(ids, weight.t())
    return rows * F.dropout(rows.new_ones(*ids.shape, 1), p) if p and training else rows
