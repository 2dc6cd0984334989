"""Operations whose parameters may be those of all rows of a batch, or have a first dimension of rows.

A form that computes by these and by broadcasting can be given the parameters of several tasks at once, stacked: one
for each row (`FormModule.takes_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(z: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """z Wᵀ + b.

    Shapes: z (…, d_in); W (d_out, d_in); b (d_out,). By rows: z (rows, tokens, d_in); W (rows, d_out, d_in); b (rows, 1, d_out).
    """
    if weight.ndim == 2:
        return F.linear(z, weight, bias)
    return torch.bmm(z, weight.mT) if bias is None else torch.baddbmm(bias, z, weight.mT)


def layer_norm(z: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """The layer norm over the last dimension. Shapes: z (…, d); weight and bias (d,), or by rows (rows, 1, d)."""
    if weight.ndim == 1:
        return F.layer_norm(z, z.shape[-1:], weight, bias, epsilon)
    return F.layer_norm(z, z.shape[-1:], None, None, epsilon) * weight + bias


def stack(values: Sequence[Tensor], ndim: int) -> Tensor:
    """One value for each row, (rows, 1, …, *size): it broadcasts with a state of `ndim` dimensions as one value does."""
    return spread(torch.stack(tuple(values)), ndim)


def spread(stacked: Tensor, ndim: int) -> Tensor:
    """Values (rows, *size) as `stack` has them."""
    missing = ndim - stacked.ndim
    return stacked.view(len(stacked), *[1] * missing, *stacked.shape[1:]) if missing > 0 else stacked
