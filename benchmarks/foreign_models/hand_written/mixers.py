"""Sub-layers that mix tokens without an attention of one kind or another, and unusual softmaxes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import attention, ffn, sequence

D, T = 16, 6


class Block(nn.Module):
    """`mix`, then a feed-forward part, each behind a norm."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.mix, self.norm1, self.norm2 = mix(), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(mix), Block(mix)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))


# Attention-free transformer (AFT-full): positions alone weigh tokens, by the exponent of a table.
class AttentionFree(Projected):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(T, T) / 4)

    def forward(self, x: Tensor) -> Tensor:
        keys, weights = torch.exp(self.k(x)), torch.exp(self.positions)
        return self.o(torch.sigmoid(self.q(x)) * (weights @ (keys * self.v(x))) / (weights @ keys))


# An Elman network, token by token.
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.o = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.i(x[:, t]) + self.h(h))
            states.append(h)
        return self.o(torch.stack(states, 1))


# External attention: keys and values are memories; a softmax over tokens, then sums over memories.
class External(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, D), nn.Linear(D, D)
        self.mk, self.mv = nn.Linear(D, 10, bias=False), nn.Linear(10, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mk(self.q(x)).softmax(1)
        return self.o(self.mv(weights / (1e-9 + weights.sum(2, keepdim=True))))


# Slot attention: a softmax over the queries, then a division by sums over the keys.
class Slots(Projected):
    def forward(self, x: Tensor) -> Tensor:
        weights = (self.k(x) @ self.q(x).transpose(1, 2) / D**0.5).softmax(-1) + 1e-8
        weights = weights / weights.sum(1, keepdim=True)
        return self.o(weights.transpose(1, 2) @ self.v(x))


NETWORK = ffn("layers.{i}.up", "layers.{i}.down", "layers.{i}.norm2")
MIXER = NETWORK | {"mixer.norm": "layers.{i}.norm1.weight"}
SLOTS = attention(**{role: f"layers.{{i}}.mix.{role}" for role in "qkvo"}, norm="layers.{i}.norm1")


def case(name: str, mix: Callable[[], nn.Module], roles: dict[str, object]) -> Case:
    return Case(f"hand-written/{name}", "hand-written", lambda: Model(mix), sequence(length=T), (Stack((0, 1), roles),))


CASES = (
    case("attention_free", AttentionFree, MIXER),
    case("recurrent_loop", Recurrent, MIXER),
    case("external_attention", External, MIXER),
    case("slot_attention", Slots, NETWORK | SLOTS),
)
