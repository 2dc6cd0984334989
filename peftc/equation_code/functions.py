"""Functions of the primitives that torch does not have under one name."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.forms.sequence_module import Sequence as Positions
from peftc.forms.sequence_module import selected

# Sylvester's Hadamard matrix; each corner is one, too.
ORDER_16 = [[float((-1) ** (i & j).bit_count()) for j in range(16)] for i in range(16)]
_has_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]
EDGE = 1e-4  # draws of noise are this far from 0 and 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b.

    Shapes: x (…, d_in); W (d_out, d_in); b (d_out,). Of rows with parameters of their own: x (rows,
    tokens, d_in); W (rows, d_out, d_in); b (rows, 1, d_out).
    """
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias, x, weight.mT)


def lookup(ids: Tensor, weight: Tensor, p: float = 0.0, training: bool = False) -> Tensor:
    """weight · onehot(ids), without the one-hot vectors; dropout of their one entry that is not 0.

    Shapes: ids (…); weight (d, count); the result (…, d).
    """
    rows = F.embedding(ids, weight.t())
    return rows * F.dropout(rows.new_ones(*ids.shape, 1), p) if p and training else rows


def cast_like(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of `like`; ids and other whole numbers have none to give."""
    return x if x.dtype == like.dtype or not like.is_floating_point() else x.to(like.dtype)


def add_to(h: Tensor, f: Tensor, factor: float = 1.0) -> Tensor:
    """h + factor · f, in the dtype of h."""
    return torch.add(h, f, alpha=factor) if f.dtype == h.dtype else h + (f * factor).to(h.dtype)


def add_linear(h: Tensor, x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    """h + factor · x Wᵀ, in the dtype of h; one operation for rows with parameters of their own."""
    fits = weight.ndim == 3 and h.ndim == 3 and h.size(0) == x.size(0) and h.size(1) == x.size(1)
    if fits and h.dtype is x.dtype and not _has_autocast():
        return torch.baddbmm(h, x, weight.mT, alpha=factor)
    return add_to(h, linear(x, weight), factor)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """x; while training, each entry is zero with probability p, and the others are x / (1 - p)."""
    return F.dropout(x, p) if training else x


def logistic_noise(x: Tensor, training: bool) -> Tensor:
    """x; while training, x + log(u / (1 - u)) with u uniform in (0, 1), and 1e-4 from its ends."""
    if not training:
        return x
    u = torch.rand_like(x).clamp(EDGE, 1 - EDGE)
    return u.log() - (1 - u).log() + x


def normal_noise(x: Tensor, s: Tensor | float, training: bool) -> Tensor:
    """x; while training, x + s e with e standard normal for each entry."""
    return torch.randn_like(x) * s + x if training else x


def pruned(v: Tensor, z: Tensor | float, mask: Tensor, is_pruned: Tensor) -> Tensor:
    """v z where the mask is 1, and v there once the other entries are pruned."""
    return mask * torch.where(is_pruned, 1.0, z) * v


def gelu_tanh(x: Tensor) -> Tensor:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2"""
    return F.gelu(x, approximate="tanh")


def softmax(x: Tensor, k: int = 0) -> Tensor:
    """exp(x) / Σ exp(x) over the last dimension; with k over its k largest, 0 for the others."""
    return torch.softmax(x if k == 0 else x.masked_fill(~_largest(x, k), -torch.inf), -1)


def history(below: Sequence[Tensor], x: Tensor) -> Tensor:
    """What sites below have, and x, (batch, tokens, d) each: (batch, tokens, sites, d)."""
    return torch.stack((*below, x), -2)


def for_tokens(a: Tensor | float, like: Tensor, dimensions: int, size: Sequence[int]) -> Tensor:
    """A value that is the same for all tokens of `like`, (…, tokens, *size).

    `dimensions`: of `like`, those of its features.
    """
    tokens = like.shape[: like.ndim - dimensions]
    if not isinstance(a, Tensor):
        a = torch.full((), a, dtype=like.dtype if like.is_floating_point() else None, device=like.device)
    return a.expand(*tokens, *size)


def token_matrices(a: Tensor, v: Tensor) -> Tensor:
    """A v with a matrix for each token.

    Shapes: A (…, tokens, m, n); v (…, tokens, n), or (n,) for all; the result (…, tokens, m).
    """
    return (a @ v.unsqueeze(-1)).squeeze(-1)


def top_k(x: Tensor, k: int) -> Tensor:
    """The k largest of the last dimension, and 0 for the others."""
    return x * _largest(x, k)


def _largest(x: Tensor, k: int) -> Tensor:
    """Which are the k largest of the last dimension; of equal ones, those that torch chooses."""
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.topk(k).indices, True)


def rms_norm(x: Tensor) -> Tensor:
    """x / √(mean of x²) over the last dimension."""
    return F.rms_norm(x, x.shape[-1:])


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


def batch_mean(x: Tensor, dimensions: int) -> Tensor:
    """The mean over the tokens of all examples: (batch, tokens, *size) to size."""
    return x.flatten(0, -dimensions - 1).mean(0)


def kron(a: Tensor, b: Tensor) -> Tensor:
    """The Kronecker product. torch's takes contiguous tensors alone."""
    return torch.kron(a.contiguous(), b.contiguous())


def layer_norm(x: Tensor, epsilon: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + ε) over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], eps=epsilon)


def concat(*vectors: Tensor) -> Tensor:
    """Vectors, or features of each token, one behind the other."""
    return torch.cat(vectors, -1)


def blocks(a: Tensor) -> Tensor:
    """The matrix with the blocks (count, rows, columns) on its diagonal."""
    return torch.block_diag(*a)


def reshape(a: Tensor, *sizes: int) -> Tensor:
    """The entries of a tensor in their order, with other dimensions."""
    return a.reshape(sizes)


def reshape_features(x: Tensor, dimensions: int, sizes: Sequence[int]) -> Tensor:
    """The last `dimensions` of a tensor, with other sizes."""
    flat = x if dimensions == 1 else x.flatten(-dimensions)
    return flat if len(sizes) == 1 else flat.unflatten(-1, tuple(sizes))


def filled_buffer(form: Any, name: str, training: bool) -> Tensor:
    """A buffer of a form. Raises: P544 while training, if no command has filled it."""
    if training:
        form.require_ready()
    return getattr(form, name)


def selection_part(form: Any, name: str, count: int) -> Tensor:
    """Of selected values, or of their places, those of a site, which has `count` of them in all.

    Raises: P540 while training, if nothing has been selected.
    """
    owner = form if form.owner_module is None else form.owner_module
    if form.training:
        owner.require_ready()
    return owner.part(name, form.form_dims.spread[0], count)


def scatter(values: Tensor, places: Tensor, n: int) -> Tensor:
    """n rows, or entries, of which those at `places` are the values, and the others 0."""
    known = (places >= 0).view(-1, *[1] * (values.ndim - 1))
    return values.new_zeros(n, *values.shape[1:]).index_put((places.clamp(min=0),), values * known)


def narrow(a: Tensor, start: int, count: int) -> Tensor:
    """So many of the first dimension, from `start` on."""
    return a.narrow(0, start, count)


def random_number(route: Tensor, at: int, count: int, training: bool) -> Tensor:
    """One of 0, 1, … count - 1, (1,): what `route` has at a place, drawn where that is negative.

    Only while training; else nobody reads it.
    """
    if not training:
        return route
    known = route[at : at + 1]
    return torch.where(known < 0, (torch.rand(1, device=route.device) * count).long(), known)


def random_part(parts: Tensor, number: Tensor, training: bool) -> Tensor:
    """The part of a number (1,) among the first dimension; the mean of all when not training."""
    return parts.index_select(0, number)[0] if training else parts.mean(0)


def mean_of_parts(parts: Tensor) -> Tensor:
    """The mean over the first dimension."""
    return parts.mean(0)


def column(v: Tensor) -> Tensor:
    """A vector (n,) as (n, 1)."""
    return v.unsqueeze(-1)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and a where b is 0."""
    return a / b.masked_fill(b == 0, 1.0)


def at_positions(
    x: Tensor, sequence: Positions | None, first: int | None, last: int | None, token: int | None = None
) -> Tensor:
    """x at the first and last tokens of each sequence and from `token` on, else 0. Raises: P423."""
    return x.masked_fill(~selected(first, last, token, sequence, x), 0.0)


def orthonormal(a: Tensor) -> Tensor:
    """The rows of a matrix made orthonormal, in their order. torch has no `qr` of float16."""
    q, upper = torch.linalg.qr(upcast(a).mT)
    return (q * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT.to(a.dtype)


def for_batch(rows: Tensor, like: Tensor) -> Tensor:
    """Keys or values (heads, rows, d) for each example of a batch, in the dtype of `like`."""
    rows = rows.to(like.dtype)
    # Those of rows with parameters of their own have a batch.
    return rows if rows.ndim == 4 else rows.expand(like.shape[0], -1, -1, -1)


def skew(q: Tensor) -> Tensor:
    """Skew-symmetric matrices (…, n, n) with the entries (…, n (n - 1) / 2) above the diagonal."""
    n = (1 + math.isqrt(1 + 8 * q.shape[-1])) // 2
    rows, columns = torch.triu_indices(n, n, 1, device=q.device)
    upper = q.new_zeros(*q.shape[:-1], n * n).index_copy(-1, rows * n + columns, q).unflatten(-1, (n, n))
    return upper - upper.mT


def eye(a: Tensor) -> Tensor:
    """The identity of the shape of square matrices (…, n, n)."""
    return torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)


def upcast(a: Tensor) -> Tensor:
    """A tensor in float32 where torch has no such function of half precision."""
    return a.float() if a.dtype in (torch.float16, torch.bfloat16) else a


def cayley(q: Tensor) -> Tensor:
    """(I - Q) (I + Q)⁻¹ of square matrices (…, n, n)."""
    one = eye(wide := upcast(q))
    return torch.linalg.solve(one + wide, one - wide, left=False).to(q.dtype)


def solve(a: Tensor, b: Tensor) -> Tensor:
    """A⁻¹ B of square matrices (…, n, n)."""
    return torch.linalg.solve(upcast(a), upcast(b)).to(a.dtype)


def inverse(a: Tensor) -> Tensor:
    """A⁻¹ of square matrices (…, n, n)."""
    return torch.linalg.inv(upcast(a)).to(a.dtype)


def circulant(c: Tensor) -> Tensor:
    """The matrix (b, b) whose column j is c (b,), moved down by j; of c (m, n, b) the blocks."""
    places = torch.arange(c.shape[-1], device=c.device)
    matrix = c[..., (places[:, None] - places) % c.shape[-1]]
    return matrix if c.ndim == 1 else matrix.transpose(1, 2).flatten(2).flatten(0, 1)


def fourier(a: Tensor) -> Tensor:
    """The real part of the inverse 2-D discrete Fourier transform of a real matrix."""
    return torch.fft.ifft2(upcast(a)).real.to(a.dtype)


def times_blocks(a: Tensor, r: Tensor) -> Tensor:
    """A blocks(R), without forming the blocks: A (rows, count · b), R (count, b, c)."""
    return torch.einsum("obk,bkc->obc", a.unflatten(1, (r.shape[0], -1)), r).flatten(1)


def block_map(x: Tensor, r: Tensor) -> Tensor:
    """blocks(R) x for each token, without forming the blocks: x (…, count · c), R (count, b, c)."""
    return torch.einsum("...bk,bck->...bc", x.unflatten(-1, (r.shape[0], -1)), r).flatten(-2)


def circulant_map(x: Tensor, c: Tensor) -> Tensor:
    """circulant(c) x for each token, by Fourier transforms: x (…, n · b), c (m, n, b) or (b,)."""
    b, of_c = c.shape[-1], torch.fft.rfft(upcast(c))
    if c.ndim == 1:
        return torch.fft.irfft(of_c * torch.fft.rfft(upcast(x)), n=b).to(x.dtype)
    of_x = torch.fft.rfft(upcast(x).unflatten(-1, (-1, b)))
    return torch.fft.irfft(torch.einsum("...nk,mnk->...mk", of_x, of_c), n=b).flatten(-2).to(x.dtype)


def pad(v: Tensor, n: int) -> Tensor:
    """A vector with zeros behind it, (n,)."""
    return F.pad(v, (0, n - len(v)))


def permuted(v: Tensor, order: Tensor) -> Tensor:
    """The entries of a vector in an order (n,)."""
    return v[order]


def walsh(v: Tensor) -> Tensor:
    """H v, H the Hadamard matrix of n rows, a power of two: (n,) to (n,), in n log n.

    H is the Kronecker product of matrices of at most 16 rows.
    """
    n, step = len(v), 1
    while step < n:
        order = min(n // step, len(ORDER_16))
        h = torch.tensor([row[:order] for row in ORDER_16[:order]], dtype=v.dtype, device=v.device)
        v = (v.view(-1, order) @ h if step == 1 else h @ v.view(-1, order, step)).view(n)
        step *= order
    return v


def svd(w: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (rows, r), s (r,) and V (columns, r) of the r largest singular values of a matrix."""
    u, s, vh = (part.to(w.dtype) for part in torch.linalg.svd(upcast(w), full_matrices=False))
    return u[:, :r], s[:r], vh[:r].mT


def qr(w: Tensor) -> tuple[Tensor, Tensor]:
    """Q and R of a matrix: Q has orthonormal columns, R is upper triangular."""
    q, r = torch.linalg.qr(upcast(w))
    return q.to(w.dtype), r.to(w.dtype)


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
