"""Layers of research code that peftc met after it had been written: an autograd function before
the stream, values of the first layer in all, and operators of exported graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, hand_written, sequence

D, H = 16, 2


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, (self.q(x), self.k(x), self.v(x)))
        return self.o(merged(functional.scaled_dot_product_attention(q, k, v)))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, attn: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.n1, self.attn, self.n2, self.mlp = nn.LayerNorm(D), attn(), nn.LayerNorm(D), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Layers(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SharedValues(Attention):
    def forward(self, x: Tensor, first: Tensor | None) -> Any:  # type: ignore[override]
        v = self.v(x)
        first = v if first is None else first
        q, k = heads(self.q(x)), heads(self.k(x))
        return self.o(merged(functional.scaled_dot_product_attention(q, k, heads(0.5 * (v + first))))), first


class SharedValuesBlock(Block):
    def __init__(self) -> None:
        super().__init__(SharedValues)

    def forward(self, x: Tensor, first: Tensor | None) -> Any:  # type: ignore[override]
        a, first = self.attn(self.n1(x), first)
        x = x + a
        return x + self.mlp(self.n2(x)), first


class ValueResidual(nn.Module):
    """Every layer returns the values of the first one beside its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharedValuesBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for layer in self.layers:
            x, first = layer(x, first)
        return x


class AtenBlock(Block):
    """Operators by the names that exported graphs have."""

    def forward(self, x: Tensor) -> Tensor:
        aten, m, y = torch.ops.aten, self.attn, self.n1(x)
        b, t, _ = y.shape
        q, k, v = (
            aten.transpose.int(aten.view.default(aten.linear.default(y, p.weight, p.bias), [b, t, H, 8]), 1, 2)
            for p in (m.q, m.k, m.v)
        )
        scores = aten.div.Tensor(aten.matmul.default(q, aten.transpose.int(k, -1, -2)), 2.83)
        z = aten.permute.default(aten.matmul.default(aten.softmax.int(scores, -1), v), [0, 2, 1, 3])
        x = aten.add.Tensor(x, aten.linear(aten.reshape.default(z, [b, t, D]), m.o.weight, m.o.bias))
        return aten.add(x, self.mlp(self.n2(x)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 1.0


class ScaledGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x)  # type: ignore[return-value]


class UntracedInput(Block):
    """An autograd function stands between the layer's input and its residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.pre = ScaledGradient()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pre(x))


AT = "layers.{i}"
PLAIN = attention(q=f"{AT}.attn.q", k=f"{AT}.attn.k", v=f"{AT}.attn.v", o=f"{AT}.attn.o", norm=f"{AT}.n1") | ffn(
    f"{AT}.mlp.w1", f"{AT}.mlp.w2", f"{AT}.n2"
)

CASES: tuple[Case, ...] = (
    hand_written("value_residual", ValueResidual, sequence(), Stack((0, 1, 2), PLAIN)),
    hand_written("aten_operators", lambda: Layers(AtenBlock), sequence(), Stack((0, 1), PLAIN, {"attn.h": None})),
    hand_written("untraced_input", lambda: Layers(UntracedInput), sequence(), Stack((0, 1), PLAIN)),
)
