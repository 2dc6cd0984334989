"""Rounds the parameters of a fold to their dtype, once, and measures what became of the change."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from peftc.adapters.base import dtype_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.report import Change

PIECE = 2**20  # entries that are compared at a time


def rounded(name: str, value: Tensor, dtype: torch.dtype, edits: tuple[str, ...]) -> Tensor:
    """A new value in the dtype of its parameter. Raises: P530 where an entry is NaN or infinite."""
    new = value.to(dtype)
    if not bool(new.isfinite().all()):
        message = f"`{name}` would have NaN or infinite entries in {dtype_name(new)}"
        notes = (f"after folding {', '.join(edits)}", "nothing was written")
        raise PeftcError(Diagnostic("P530", message, notes=notes))
    return new


def change_of(
    name: str, before: Tensor, value: Tensor, new: Tensor, edits: tuple[str, ...], created: bool = False
) -> Change:
    """What became of a parameter: `before`, its value after the folds, and that value rounded."""
    entries = changed = 0
    sizes = [0.0, 0.0, 0.0]  # squares of W, of Δ, and of what rounding adds
    for old, exact, stored in zip(*(pieces(tensor) for tensor in (before, value, new)), strict=True):
        old, stored = old.to(exact.dtype), stored.to(exact.dtype)
        delta, error = exact - old, stored - exact
        entries += int(torch.count_nonzero(stored != old))
        changed += int(torch.count_nonzero(delta))
        for i, part in enumerate((old, delta, error)):
            sizes[i] += float(torch.linalg.vector_norm(part)) ** 2
    weight, delta, error = map(math.sqrt, sizes)
    return Change(
        name,
        new.numel(),
        entries,
        entries / changed if changed else 1.0,
        dtype_name(new),
        created,
        edits,
        delta / weight if weight else math.inf if delta else 0.0,
        error / delta if delta else 0.0,
    )


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor that fit into a cache; all tensors of a shape are cut alike."""
    return iter(tensor.reshape(-1).split(PIECE))
