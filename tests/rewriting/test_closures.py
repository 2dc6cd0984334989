"""Modules that a layer calls with a function, whose closure has values of the layer's call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc
from tests.laws.harness import randomise
from tests.layers import Layers

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, f: nn.Module) -> Tensor:
        return x + f(self.norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).masked_fill(mask.repeat(1, 1, 1) == 0, -1e9)
        return self.o(scores.softmax(-1) @ self.v(x))


class Layer(nn.Module):
    """The Annotated Transformer, and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.network = nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D), nn.Tanh())
        self.first, self.second = Residual(), Residual()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(1, x.shape[1], x.shape[1], device=x.device).tril()
        x = self.first(x, lambda y: self.attention(y, mask))
        return self.second(x, self.network)


def test_an_edit_beside_a_module_that_calls_a_function() -> None:
    """The edit reads the stream: it is in the layer's code, and not in that of the network."""
    torch.manual_seed(0)
    model = Layers(Layer(), Layer()).double()
    peftc.compile("peft 1  edit e at layer[*].ffn { h += linear(res, bias=false) }", model, seed=0, sample={"x": X})
    weights = peftc.parameters(model)
    randomise(weights)
    edited = model(X)
    peftc.remove(model)
    for layer, weight in zip(model.layers, weights.values(), strict=True):
        seen: list[Tensor] = []
        layer.second.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        layer.network.register_forward_hook(lambda _, args, h, seen=seen, w=weight: h + seen[-1] @ w.T)
    torch.testing.assert_close(edited, model(X), rtol=0, atol=1e-10)
