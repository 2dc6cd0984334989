"""Numbers in place of the entries of a tensor: what code does to the layout is done to them.

Most dimensions of such a tensor have the same numbers throughout. They have stride 0, so that views
of it cost nothing, and questions look at one of their entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from peftc.addressing.sites import Slice


def numbered(sizes: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """A tensor whose entries are numbered along `dims`, and equal along the others."""
    own = [sizes[dim] for dim in dims]
    numbers = torch.arange(torch.Size(own).numel(), dtype=torch.int32).view(own)
    for dim in range(len(sizes)):
        numbers = numbers if dim in dims else numbers.unsqueeze(dim)
    return numbers.expand(tuple(sizes))


def distinct(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers with one entry of the dimensions that only repeat them."""
    for dim, stride in enumerate(numbers.stride()):
        numbers = numbers.narrow(dim, 0, 1) if stride == 0 and numbers.shape[dim] > 1 else numbers
    return numbers


def varies(numbers: torch.Tensor, dims: int | Sequence[int]) -> bool:
    """Whether numbers differ along some dimensions."""
    own = first = distinct(numbers)
    for dim in [dims] if isinstance(dims, int) else dims:
        first = first.narrow(dim, 0, 1)
    return own.shape != first.shape and bool((own != first).any())


def as_slice(features: torch.Tensor, width: int) -> Slice | None:
    """Sorted numbers of features as equal blocks at equal distances; None where they are none."""
    if not len(features):
        return None
    ends = (features.diff() != 1).nonzero()[:, 0] + 1  # of runs of consecutive numbers
    starts = [0, *ends.tolist()]
    lengths = {stop - start for start, stop in pairwise([*starts, len(features)])}
    runs: list[int] = features[starts].tolist()
    strides = {after - before for before, after in pairwise(runs)}
    if len(lengths) != 1 or len(strides) > 1:
        return None
    start, stop = runs[0], runs[0] + lengths.pop()
    if not strides:
        return Slice(start, stop)
    stride = strides.pop()
    rows = Slice(start, stop, stride, len(runs))
    return rows if stride * len(runs) <= width and stop - rows.base(width) <= stride else None
