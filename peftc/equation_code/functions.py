"""Functions of the primitives that torch does not have under one name."""

import torch
from torch import Tensor
from torch.nn import functional as F


def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`; ids and other whole numbers have none to give."""
    return x if x.dtype == like.dtype or not like.is_floating_point() else x.to(like.dtype)


def add_to(h: Tensor, f: Tensor, factor: float = 1.0) -> Tensor:
    """h + factor · f, in the dtype of h."""
    return torch.add(h, f, alpha=factor) if f.dtype == h.dtype else h + (f * factor).to(h.dtype)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x; while training, each entry is zero with probability p, and the others are x / (1 - p)."""
    return F.dropout(x, p) if training else x


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2"""
    return F.gelu(x, approximate="tanh")


def softmax(x: Tensor) -> Tensor:
    """exp(x) / Σ exp(x) over the last dimension."""
    return torch.softmax(x, -1)


def norm(w: Tensor) -> Tensor:
    """‖w‖ over the last dimension, (…, 1).

    Of a contiguous copy, so that the order of summation does not depend on the storage.
    """
    return torch.linalg.vector_norm(w.contiguous(), dim=-1, keepdim=True)


def mean(x: Tensor) -> Tensor:
    """The mean over the last dimension, (…, 1)."""
    return x.mean(-1, keepdim=True)


def token_mean(x: Tensor, dimensions: int) -> Tensor:
    """The mean over the tokens: (batch, tokens, *size) to (batch, 1, *size); x without tokens.

    `dimensions`: of size.
    """
    return x.mean(1, keepdim=True) if x.ndim > dimensions + 1 else x


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product. torch's takes contiguous tensors alone."""
    return torch.kron(a.contiguous(), b.contiguous())


def layer_norm(x: Tensor) -> Tensor:
    """(x - mean) / deviation over the last dimension."""
    return F.layer_norm(x, x.shape[-1:])


def blocks(a: Tensor) -> Tensor:
    """The matrix with the blocks (count, rows, columns) on its diagonal."""
    return torch.block_diag(*a)


def column(v: Tensor) -> Tensor:
    """A vector (n,) as (n, 1)."""
    return v.unsqueeze(-1)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and a where b is 0."""
    return a / b.masked_fill(b == 0, 1.0)


def t(a: Tensor) -> Tensor:
    """The transpose of a matrix, or of each in a stack."""
    return a.mT


def head_maps(x: Tensor, a: Tensor) -> Tensor:
    """A matrix for each head times its features.

    Shapes: x (…, heads, d); A (heads, r, d); the result (…, heads, r). Of rows with matrices of
    their own: x (rows, …, heads, d); A (rows, heads, r, d).
    """
    return torch.einsum("hrd,...hd->...hr" if a.ndim == 3 else "nhrd,n...hd->n...hr", a, x)


def heads_first(f: Tensor) -> Tensor:
    """A value (…, tokens, heads, d), or (heads, d) for all tokens, with its heads first."""
    return f.unsqueeze(1) if f.ndim == 2 else f.transpose(1, 2)


def corner(a: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns of a matrix."""
    return a[..., :rows, :columns]


def kron_map(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """(A ⊗ B) x, without forming the product: with x as (columns of A, columns of B), A x Bᵀ.

    Shapes: x (…, n · q); A (m, n); B (p, q); the result (…, m · p).
    """
    return (a @ F.linear(x.unflatten(-1, (a.shape[1], -1)), b)).flatten(-2)
