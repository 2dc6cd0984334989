"""Affine functions of one vector, kept as a diagonal and products so that a wide identity never becomes a square matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ENTRIES = 2**17  # of a matrix that are computed at a time


@dataclass(frozen=True, eq=False)
class Affine:
    """v ↦ diagonal ⊙ v + Σ L (R v) + bias

    Shapes: diagonal (d,), where d_in = d_out = d; L (d_out, k); R (k, d_in), or None for the identity; bias (d_out,).
    """

    diagonal: Tensor | None = None
    products: tuple[tuple[Tensor, Tensor | None], ...] = ()
    bias: Tensor | None = None

    @staticmethod
    def identity(d: int, dtype: torch.dtype, device: torch.device) -> Affine:
        return Affine(diagonal=torch.ones(d, dtype=dtype, device=device))

    @staticmethod
    def linear(weight: Tensor, bias: Tensor | None = None) -> Affine:
        """v ↦ weight v + bias"""
        return Affine(products=((weight, None),), bias=bias)

    @property
    def dtype(self) -> torch.dtype:
        return self._some().dtype

    @property
    def device(self) -> torch.device:
        return self._some().device

    def through(self, weight: Tensor, bias: Tensor | None = None) -> Affine:
        """weight · self + bias, for a weight (out, d_out)."""
        weight = weight.detach().to(self.dtype)
        parts: list[tuple[Tensor, Tensor | None]] = [
            (weight, left) if right is None else (weight @ left, right) for left, right in self.products
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
            tuple((left * column, right) for left, right in self.products),
            None if self.bias is None else self.bias * factor,
        )

    def plus(self, other: Affine) -> Affine:
        return Affine(_sum(self.diagonal, other.diagonal), self.products + other.products, _sum(self.bias, other.bias))

    def shifted(self, by: Tensor | float) -> Affine:
        """self + by, for a number, or a vector (d_out,)."""
        zero = self._some().new_zeros(self.d_out)
        return replace(self, bias=_sum(self.bias, zero + by))

    def matrix(self) -> Tensor:
        """(d_out, d_in)"""
        total = None if self.diagonal is None else torch.diag(self.diagonal)
        for left, right in self.products:
            total = _sum(total, left if right is None else left @ right)
        assert total is not None
        return total

    def write_matrix(self, out: Tensor) -> None:
        """Writes the matrix into `out` (d_out, d_in), which may be one of the factors.

        Products are computed as a whole, so that their bits are those of PyTorch's product; their
        sum is computed some rows at a time, which stay in a cache.
        """
        parts = [left if right is None else left @ right for left, right in self.products]
        if self.diagonal is not None or any(part.shape != out.shape for part in parts):
            out.copy_(self.matrix())
            return
        step = max(1, ENTRIES // max(1, out.shape[1]))
        for start in range(0, len(out), step):
            rows = slice(start, start + step)
            out[rows] = sum((part[rows] for part in parts[1:]), start=parts[0][rows])

    @property
    def d_out(self) -> int:
        return self.diagonal.shape[0] if self.diagonal is not None else self.products[0][0].shape[0]

    def _some(self) -> Tensor:
        return self.diagonal if self.diagonal is not None else self.products[0][0]


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left + right
