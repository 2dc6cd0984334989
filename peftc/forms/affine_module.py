"""Affine functions of one vector, kept as a diagonal and products so that a wide identity never becomes a square matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

ENTRIES = 2**17  # of a matrix that are computed at a time on a CPU: they stay in a cache
LEAST_ROWS = 8  # at a time; PyTorch's product of one row has other bits than that row of a product


class RowBlock(NamedTuple):
    """Rows of a matrix. `before`: what the weight alone is there, in the same precision. `change`: what is added to it, if it
    is one product.
    """

    rows: slice
    values: Tensor
    before: Tensor
    change: Tensor | None


@dataclass(frozen=True, eq=False)
class Affine:
    """v ↦ diagonal ⊙ v + weight v + Σ L (R v) + bias

    Shapes: diagonal (d,), where d_in = d_out = d; weight (d_out, d_in), which may have a lower precision than the rest; L
    (d_out, k); R (k, d_in), or None for the identity; bias (d_out,).
    """

    diagonal: Tensor | None = None
    products: tuple[tuple[Tensor, Tensor | None], ...] = ()
    bias: Tensor | None = None
    weight: Tensor | None = field(default=None, kw_only=True)

    @staticmethod
    def identity(d: int, dtype: torch.dtype, device: torch.device) -> Affine:
        return Affine(diagonal=torch.ones(d, dtype=dtype, device=device))

    @staticmethod
    def linear(weight: Tensor, bias: Tensor | None = None) -> Affine:
        """v ↦ weight v + bias"""
        return Affine(bias=bias, weight=weight)

    @property
    def dtype(self) -> torch.dtype:
        """Of its sums."""
        return torch.promote_types(self._some().dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._some().device

    def through(self, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """weight · self + bias, for a weight (out, d_out)."""
        weight = weight.detach().to(self.dtype)
        parts: list[tuple[Tensor, Tensor | None]] = [
            (weight, left) if right is None else (weight @ left, right) for left, right in self.all_products()
        ]
        if self.diagonal is not None:
            parts.append((weight * self.diagonal, None))
        moved = Affine(products=tuple(parts), bias=None if self.bias is None else weight @ self.bias)
        return moved if bias is None else moved.shifted(bias.detach().to(self.dtype))

    def scaled(self, factor: Tensor | float) -> Affine:
        """factor ⊙ self, for a number, or a vector (d_out,)."""
        column = factor.reshape(-1, 1) if isinstance(factor, Tensor) else factor
        return Affine(
            None if self.diagonal is None else self.diagonal * factor,
            tuple((left * column, right) for left, right in self.all_products()),
            None if self.bias is None else self.bias * factor,
        )

    def plus(self, other: Affine) -> Affine:
        own, others = (
            (self.products, other.all_products()) if self.weight is not None else (self.all_products(), other.products)
        )
        weight = other.weight if self.weight is None else self.weight
        return Affine(_sum(self.diagonal, other.diagonal), own + others, _sum(self.bias, other.bias), weight=weight)

    def shifted(self, by: Tensor | float) -> Affine:
        """self + by, for a number, or a vector (d_out,)."""
        zero = self._some().new_zeros(self.d_out)
        return replace(self, bias=_sum(self.bias, zero + by))

    def all_products(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """The products, and the weight as the first of them."""
        return self.products if self.weight is None else ((self.weight.to(self.dtype), None), *self.products)

    def matrix(self) -> Tensor:
        """(d_out, d_in)"""
        out = torch.empty(self.d_out, self.d_in, dtype=self.dtype, device=self.device)
        for block in self.row_blocks():
            out[block.rows] = block.values
        return out

    def row_blocks(self, part: int = 0, parts: int = 1) -> Iterator[RowBlock]:
        """The matrix, some rows at a time: all, or those of one of `parts`.

        Each block is in the memory of the one before it.
        """
        count, width = self.d_out, self.d_in
        most = ENTRIES if self.device.type == "cpu" else count * width
        blocks = max(1, count // max(LEAST_ROWS, most // max(1, width)))
        largest = -(-count // blocks)
        memory = torch.empty(3, largest, width, dtype=self.dtype, device=self.device)
        if self.weight is None:
            memory[0].zero_()
        is_sum = self.weight is not None and self.diagonal is None and len(self.products) == 1
        for i in range(blocks * part // parts, blocks * (part + 1) // parts):
            rows = slice(count * i // blocks, count * (i + 1) // blocks)
            before, out, product = memory[:, : rows.stop - rows.start]
            total, added = before if self.weight is None else before.copy_(self.weight[rows]), None
            for left, right in self.products:
                added = left[rows] if right is None else torch.mm(left[rows], right, out=product)
                total = torch.add(total, added, out=out)
            if total is before:
                out.copy_(before)
            if self.diagonal is not None:
                out[:, rows].diagonal().add_(self.diagonal[rows])
            yield RowBlock(rows, out, before, added if is_sum else None)

    @property
    def d_out(self) -> int:
        return self._some().shape[0]

    @property
    def d_in(self) -> int:
        if self.products and self.products[0][1] is not None:
            return self.products[0][1].shape[1]
        return self._some().shape[-1]

    def _some(self) -> Tensor:
        first = self.diagonal if self.diagonal is not None else self.weight
        return first if first is not None else self.products[0][0]


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
