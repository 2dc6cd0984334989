"""Attentions as people write them: how queries, keys and values are computed, how heads are split,
how scores become a result, and what computes the output. Each part is a mixin with the parameters
of its roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

functional: Any = nn.functional
D, HEADS, WIDTH = 16, 2, 8  # features, heads, and features of a head
Triple = tuple[Tensor, Tensor, Tensor]
Roles = Mapping[str, str]


class Part(nn.Module):
    """`roles`: the parameter of each, as benchmarks.foreign_models.case writes them."""

    roles: ClassVar[Roles] = {}
    heads: Any
    joined: Any


def per_head(t: Tensor) -> Tensor:
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


# Queries, keys and values, by head ---------------------------------------------------------


class ThreeLinears(Part):
    roles: ClassVar[Roles] = {role: f"{role}.weight" for role in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Linear(D, D)

    def project(self, x: Tensor) -> Triple:
        return self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))


class ListOfLinears(Part):
    roles: ClassVar[Roles] = {role: f"linears.{i}.weight" for i, role in enumerate("qkv")}

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def project(self, x: Tensor) -> Triple:
        q, k, v = (self.heads(linear(x)) for linear in self.linears)
        return q, k, v


class KeysAndValues(Part):
    roles: ClassVar[Roles] = {"q": "q.weight", "k": "kv.weight[0:16]", "v": "kv.weight[16:32]"}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(D, D), nn.Linear(D, 2 * D)

    def project(self, x: Tensor) -> Triple:
        q, k, v = (self.heads(t) for t in (self.q(x), *self.kv(x).chunk(2, -1)))
        return q, k, v


class Packed(Part):
    roles: ClassVar[Roles] = {role: f"qkv.weight[{D * i}:{D * (i + 1)}]" for i, role in enumerate("qkv")}

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def project(self, x: Tensor) -> Triple:
        q, k, v = map(self.heads, self.qkv(x).split(D, dim=-1))
        return q, k, v


class PackedHeads(Packed):
    def project(self, x: Tensor) -> Triple:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


class InterleavedHeads(Packed):
    roles: ClassVar[Roles] = {
        role: f"qkv.weight[{WIDTH * i}:{WIDTH * (i + 1)}, {WIDTH * (i + 3)}:{WIDTH * (i + 4)}]"
        for i, role in enumerate("qkv")
    }

    def project(self, x: Tensor) -> Triple:
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3 * WIDTH)).transpose(1, 2).chunk(3, -1)
        return q, k, v


class BareMatrices(Part):
    roles: ClassVar[Roles] = {role: f"w_{role}" for role in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(D, D) / 4) for _ in range(3))

    def project(self, x: Tensor) -> Triple:
        k, v = functional.linear(input=x, weight=self.w_k), functional.linear(x, self.w_v)
        return self.heads(functional.linear(x, self.w_q)), self.heads(k), self.heads(v)


class BareProducts(BareMatrices):
    roles: ClassVar[Roles] = {role: f"w_{role}.T" for role in "qkv"}

    def project(self, x: Tensor) -> Triple:
        return self.heads(x @ self.w_q), self.heads(torch.matmul(x, self.w_k)), self.heads(x @ self.w_v)


class Einsums(Part):
    roles: ClassVar[Roles] = {role: f"w_{role}(d h k -> h k | d)" for role in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(D, HEADS, WIDTH) / 4) for _ in range(3))

    def project(self, x: Tensor) -> Triple:
        q, k, v = (torch.einsum("bnd,dhk->bhnk", x, w) for w in (self.w_q, self.w_k, self.w_v))
        return q, k, v


class Convolutions(Part):
    roles: ClassVar[Roles] = {role: f"{role}.weight" for role in "qkv"}

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(D, D, 1) for _ in range(3))

    def project(self, x: Tensor) -> Triple:
        q, k, v = (self.heads(f(x.transpose(1, 2)).transpose(1, 2)) for f in (self.q, self.k, self.v))
        return q, k, v


# Heads ---------------------------------------------------------


class View(Part):
    def heads(self, t: Tensor) -> Tensor:
        return per_head(t)

    def joined(self, o: Tensor) -> Tensor:
        return o.transpose(1, 2).flatten(2)


class Chunk(Part):
    def heads(self, t: Tensor) -> Tensor:
        return torch.stack(t.chunk(HEADS, -1), 1)

    def joined(self, o: Tensor) -> Tensor:
        return torch.cat(o.unbind(1), -1)


# Scores and result ---------------------------------------------------------


class ScaledDotProduct(Part):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query=q, key=k, value=v)


class CausalMask(Part):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * WIDTH**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -1e9).softmax(-1) @ v


class BatchedProducts(Part):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        weights = functional.softmax(torch.bmm(q * WIDTH**-0.5, k.transpose(1, 2)), dim=-1)
        return torch.bmm(weights, v).unflatten(0, (-1, HEADS))


class EinsumScores(Part):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) / WIDTH**0.5).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)


class StableSoftmax(Part):
    """Each query's largest score is subtracted, after a soft cap."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = 5 * torch.tanh(q @ k.transpose(-2, -1) / 5)
        return torch.softmax(scores - scores.amax(-1, keepdim=True).detach(), -1) @ v


class CosineSimilarity(Part):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
        return (scores * self.temperature.exp()).softmax(-1) @ v


class LinearAttention(Part):
    """Katharopoulos et al. 2020, arXiv:2006.16236: no softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        return (q @ (k.mT @ v)) / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True)


class RotaryEmbedding(Part):
    """Positions turn pairs of features; queries and keys are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.q_norm(q), self.k_norm(k)
        angle = torch.arange(q.shape[-2], device=q.device, dtype=q.dtype)[:, None] / torch.arange(1, 5).to(q)
        angle = torch.cat((angle, angle), -1)

        def turn(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * angle.cos() + torch.cat((-b, a), -1) * angle.sin()

        return functional.scaled_dot_product_attention(turn(q), turn(k), v)


# Output ---------------------------------------------------------


class Output(Part):
    roles: ClassVar[Roles] = {"o": "o.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(D, D)

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o(self.joined(o))


class OutputSequence(Part):
    roles: ClassVar[Roles] = {"o": "to_out.0.weight"}

    def __init__(self) -> None:
        super().__init__()
        self.to_out = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.0))

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.to_out(self.joined(o))


class BareOutput(Part):
    roles: ClassVar[Roles] = {"o": "w_o(h k d -> d | h k)"}

    def __init__(self) -> None:
        super().__init__()
        self.w_o = nn.Parameter(torch.randn(HEADS, WIDTH, D) / 4)

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("bnhk,hkd->bnd", self.joined(o).unflatten(-1, (HEADS, WIDTH)), self.w_o)


class NoOutput(Part):
    def output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.joined(o)


class GatedOutput(Output):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, D)

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o(self.joined(o) * torch.sigmoid(self.gate(x)))


class Attention(Part):
    project: Any
    attend: Any
    output: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attend(*self.project(x)), x)


_OF_MODULES = (ThreeLinears, ListOfLinears, KeysAndValues, Packed, PackedHeads, InterleavedHeads, Convolutions)
PROJECTIONS: tuple[type[Part], ...] = (*_OF_MODULES, BareMatrices, BareProducts, Einsums)
SPLITS: tuple[type[Part], ...] = (View, Chunk)
CORES: tuple[type[Part], ...] = (
    ScaledDotProduct,
    CausalMask,
    BatchedProducts,
    EinsumScores,
    StableSoftmax,
    CosineSimilarity,
    LinearAttention,
    RotaryEmbedding,
)
OUTPUTS: tuple[type[Part], ...] = (Output, OutputSequence, BareOutput, NoOutput, GatedOutput)
