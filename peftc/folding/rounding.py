"""Rounds the parameters of a fold to their dtype, once, and measures what became of the change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from peftc.adapters.base import dtype_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.memory import empty
from peftc.folding.report import Change
from peftc.folding.threads import PARTS, in_parts
from peftc.forms.affine_module import ENTRIES, Affine

PIECE = ENTRIES


@dataclass(frozen=True, eq=False)
class Piece:
    """Some entries of a parameter, flat, from the entry `start` on.

    `values`: before they are rounded. `before`: as they were, in the same precision, and `change`:
    what was added to them, if known.
    """

    start: int
    values: Tensor
    before: Tensor | None = None
    change: Tensor | None = None


@dataclass(eq=False)
class WeightSums:
    """A parameter of which some rows change, each computed when it is rounded.

    `changes`: by the first of their entries, affine functions that begin with the rows as they are.
    """

    before: Tensor
    changes: dict[int, Affine] = field(default_factory=dict[int, Affine])

    def add(self, rows: Tensor, value: Affine) -> None:
        """Rows of `before`, contiguous, become the matrix of an affine function."""
        self.changes[int(rows.storage_offset() - self.before.storage_offset())] = value

    def overlaps(self, rows: Tensor) -> bool:
        """Whether some of these rows of `before` change, or may."""
        start = rows.storage_offset() - self.before.storage_offset()
        stop = start + 1 + sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
        return any(start < at + value.d_out * value.d_in and at < stop for at, value in self.changes.items())

    def pieces(self, part: int = 0, parts: int = 1) -> Iterator[Piece]:
        """The flat values in the precision of the sums, in order; of `parts`, those of one."""
        before, at = self.before.reshape(-1), 0
        for start, value in sorted(self.changes.items(), key=lambda change: change[0]):
            yield from _unchanged(before, at, start, part, parts)
            is_sum = value.weight is not None and is_same_run(value.weight, before[start:])
            for block in value.row_blocks(part, parts):
                old, change = (block.before, block.change) if is_sum else (None, None)
                own = (None if tensor is None else tensor.reshape(-1) for tensor in (old, change))
                yield Piece(start + block.rows.start * value.d_in, block.values.reshape(-1), *own)
            at = start + value.d_out * value.d_in
        yield from _unchanged(before, at, before.numel(), part, parts)

    def tensor(self) -> Tensor:
        out = torch.empty(self.before.shape, dtype=torch.promote_types(self.before.dtype, torch.float32))
        out = out.to(self.before.device)
        for piece in self.pieces():
            out.view(-1)[piece.start : piece.start + piece.values.numel()] = piece.values
        return out


def _unchanged(before: Tensor, start: int, stop: int, part: int, parts: int) -> Iterator[Piece]:
    dtype, places = torch.promote_types(before.dtype, torch.float32), range(start, stop, PIECE)
    for at in places[len(places) * part // parts : len(places) * (part + 1) // parts]:
        values = before[at : min(at + PIECE, stop)].to(dtype)
        yield Piece(at, values, values)


def is_run_of_entries(rows: Tensor, whole: Tensor) -> bool:
    """Whether the entries of a matrix are a view of a tensor's, one after the other in both."""
    is_view = rows.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return rows.ndim == 2 and is_view and rows.is_contiguous() and whole.is_contiguous()


def is_same_run(rows: Tensor, flat: Tensor) -> bool:
    """Whether the entries of a matrix are the first of a flat tensor, and not copies of them."""
    return rows.data_ptr() == flat.data_ptr() and rows.is_contiguous() and rows.dtype == flat.dtype


def pieces_of(value: Tensor) -> Iterator[Piece]:
    flat, size = value.reshape(-1), PIECE if value.device.type == "cpu" else max(1, value.numel())
    return (Piece(at, flat[at : at + size]) for at in range(0, flat.numel(), size))


def rounded(name: str, value: Tensor, dtype: torch.dtype, edits: tuple[str, ...]) -> Tensor:
    """A new value in the dtype of its parameter. Raises: P530 where an entry is NaN or infinite."""
    new = value.to(dtype)
    if not bool(new.isfinite().all()):
        raise not_finite(name, new, edits)
    return new


def rounded_change(
    name: str, before: Tensor, value: Tensor | WeightSums, edits: tuple[str, ...], created: bool = False
) -> tuple[Tensor, Change]:
    """A new value in the dtype of `before`, and what became of the parameter. Raises: P530."""
    new = empty(tuple(before.shape), before.dtype, before.device)
    if isinstance(value, WeightSums) and before.device.type == "cpu":
        parts = in_parts(lambda part: _round(before, value.pieces(part, PARTS), new))
    else:
        parts = [_round(before, value.pieces() if isinstance(value, WeightSums) else pieces_of(value), new)]
    changed, entries = sum(part.changed for part in parts), sum(part.entries for part in parts)
    weight, delta, error = (sum(getattr(part, name) for part in parts) for name in ("weight", "delta", "error"))
    if not math.isfinite(delta + error) and not bool(new.isfinite().all()):
        raise not_finite(name, new, edits)
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


@torch.no_grad()
def _round(before: Tensor, pieces: Iterable[Piece], new: Tensor) -> Totals:
    """Writes pieces into `new`, in its dtype."""
    totals, flat_before, flat_new = Totals(), before.reshape(-1), new.view(-1)
    for piece in pieces:
        part = slice(piece.start, piece.start + piece.values.numel())
        stored = flat_new[part].copy_(piece.values)
        old = flat_before[part] if piece.before is None else piece.before
        totals.add(old, piece.values, stored if before.dtype != piece.values.dtype else None, piece.change)
    return totals


class Totals:
    """Sums over the entries of a parameter.

    `changed`: how many entries change; `entries`: how many still differ when they are rounded.
    `weight`, `delta`, `error`: of squares of W, of Δ, and of what rounding adds.
    """

    def __init__(self) -> None:
        self.changed = self.entries = 0
        self.weight = self.delta = self.error = 0.0
        self.memory: Tensor | None = None

    def add(self, before: Tensor, exact: Tensor, stored: Tensor | None, delta: Tensor | None) -> None:
        """Adds flat entries. `stored`: after rounding, where the dtypes differ. `delta`: `exact` −
        `before`, if known.
        """
        count, dtype = exact.numel(), torch.promote_types(exact.dtype, torch.float32)
        if self.memory is None or self.memory.shape[1] < count:  # new memory costs more than the sums
            self.memory = torch.empty(2, count, dtype=dtype, device=exact.device)
        other, change = self.memory[:, :count]
        exact = exact.to(dtype)
        old = before if before.dtype == dtype else before.to(dtype)
        self.weight += square(old)
        self.delta += square(torch.sub(exact, old, out=change) if delta is None else delta)
        changed = differing(exact, old)
        self.changed += changed
        if stored is None:
            self.entries += changed
        else:
            new = other.copy_(stored)
            self.error += square(torch.sub(new, exact, out=change))
            self.entries += differing(new, old)


def square(values: Tensor) -> float:
    return float(torch.dot(values, values))


def differing(one: Tensor, other: Tensor) -> int:
    """How many entries of two tensors are not equal. NumPy is several times faster on a CPU."""
    if one.device.type != "cpu":
        return int(torch.count_nonzero(one != other))
    return int(np.count_nonzero(one.numpy() != other.numpy()))


def ratio(part: float, whole: float) -> float:
    """Of lengths, from their squares."""
    return math.sqrt(part / whole) if whole and math.isfinite(part) else math.inf if part else 0.0


def not_finite(name: str, new: Tensor, edits: tuple[str, ...]) -> PeftcError:
    message = f"`{name}` would have NaN or infinite entries in {dtype_name(new)}"
    notes = (f"after folding {', '.join(edits)}", "nothing was written")
    return PeftcError(Diagnostic("P530", message, notes=notes))
