"""Rounds the parameters of a fold to their dtype, once, and measures what became of the change."""

import math

import torch
from torch import Tensor

from peftc.adapters.base import dtype_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.report import Change

PIECE = 2**16  # entries at a time: what is computed of them stays in a cache


def rounded(name: str, value: Tensor, dtype: torch.dtype, edits: tuple[str, ...]) -> Tensor:
    """A new value in the dtype of its parameter. Raises: P530 where an entry is NaN or infinite."""
    new = value.to(dtype)
    if not bool(new.isfinite().all()):
        raise not_finite(name, new, edits)
    return new


def rounded_change(
    name: str, before: Tensor, value: Tensor, edits: tuple[str, ...], created: bool = False
) -> tuple[Tensor, Change]:
    """A new value in the dtype of `before`, and what became of the parameter. Raises: P530."""
    entries = changed = 0
    weight = delta = error = 0.0  # squares of W, of Δ, and of what rounding adds
    new = torch.empty(value.shape, dtype=before.dtype, device=value.device)
    exact_dtype = torch.promote_types(value.dtype, torch.float32)
    parts = (tensor.reshape(-1).split(PIECE) for tensor in (before, value, new))
    for old, exact, place in zip(*parts, strict=True):
        place.copy_(exact)
        old, exact, stored = (tensor.to(exact_dtype) for tensor in (old, exact, place))
        change = exact - old
        changed += int(torch.count_nonzero(change))
        weight += square(old)
        delta += square(change)
        if before.dtype != value.dtype:
            entries += int(torch.count_nonzero(stored - old))
            error += square(stored - exact)
    if not math.isfinite(delta + error) and not bool(new.isfinite().all()):
        raise not_finite(name, new, edits)
    entries = changed if before.dtype == value.dtype else entries
    return new, Change(
        name,
        new.numel(),
        entries,
        entries / changed if changed else 1.0,
        dtype_name(before),
        created,
        edits,
        ratio(delta, weight),
        ratio(error, delta),
    )


def square(values: Tensor) -> float:
    return float(torch.dot(values, values))


def ratio(part: float, whole: float) -> float:
    """Of lengths, from their squares."""
    return math.sqrt(part / whole) if whole and math.isfinite(part) else math.inf if part else 0.0


def not_finite(name: str, new: Tensor, edits: tuple[str, ...]) -> PeftcError:
    message = f"`{name}` would have NaN or infinite entries in {dtype_name(new)}"
    notes = (f"after folding {', '.join(edits)}", "nothing was written")
    return PeftcError(Diagnostic("P530", message, notes=notes))
