"""Rows in other places, and the inverse wavelet transform, which are linear in their entries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.equation_code.functions import scatter
from peftc.equations.transforms.filters import WAVELETS


def gather(v: Tensor, places: Tensor) -> Tensor:
    """The rows of a tensor, or entries of a vector, at places (k,): (n, …) to (k, …)."""
    return v.index_select(0, places)


def narrow_features(x: Tensor, start: int, count: int) -> Tensor:
    """So many of the last dimension, from `start` on."""
    return x.narrow(-1, start, count)


def rows_at(a: Tensor, places: Tensor) -> Tensor:
    """The rows, or entries, at some places, and 0 for the others."""
    return a * scatter(a.new_ones(len(places)), places, len(a)).view(-1, *[1] * (a.ndim - 1))


def shuffle(a: Tensor, groups: int, m: int, n: int) -> Tensor:
    """Rows numbered (group, i, j, k), i below m and j below n, as (group, j, i, k)."""
    return a.reshape(groups, m, n, -1, *a.shape[1:]).transpose(1, 2).reshape(a.shape)


def wavelet(a: Tensor, name: str) -> Tensor:
    """The inverse discrete wavelet transform of one level of a matrix, in both directions.

    For n rows, or columns, and a filter of L taps, the matrix stands in the middle of n + L - 2
    coefficients, one more for an odd n, of which the others are 0. Their quarters are the
    approximation and the details that PyWavelets names cA, cH; cV, cD. What they reconstruct
    begins with the value.
    """
    low = torch.tensor(WAVELETS[name], dtype=a.dtype, device=a.device)
    signs = torch.ones_like(low)
    signs[1::2] = -1
    filters = torch.stack([low, low.flip(0) * signs]).unsqueeze(1)
    ends = [(len(low) // 2 - 1, len(low) // 2 - 1 + n % 2) for n in a.shape]
    whole = F.pad(a, (*ends[1], *ends[0])).unflatten(1, (2, -1)).unflatten(0, (2, -1))
    whole = whole.transpose(0, 2).flatten(2).flatten(0, 1)  # cH is low-pass along the rows
    rows, columns = a.shape
    return _inverse(_inverse(whole, filters)[:rows].mT, filters)[:columns].mT


def _inverse(a: Tensor, filters: Tensor) -> Tensor:
    """Of each column, of which the first half is low-pass and the second high-pass."""
    halves = a.unflatten(0, (2, -1)).permute(2, 0, 1)  # (columns, 2, coefficients)
    return F.conv_transpose1d(halves, filters, stride=2)[:, 0, filters.shape[-1] - 2 :].mT
