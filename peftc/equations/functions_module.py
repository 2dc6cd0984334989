"""Functions of the primitives that torch does not have under one name."""

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.module import map_ids


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


def lookup(ids: Tensor, weight: Tensor, dropout: float = 0.0) -> Tensor:
    """weight · onehot(ids), with dropout of the one-hot vectors.

    Shapes: ids (…); weight (d, count); the result (…, d).
    """
    return map_ids(ids, weight, dropout)
