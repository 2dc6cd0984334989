"""A model of layers in sequence, and plain sub-layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

functional: Any = nn.functional


class Layers(nn.Module):
    """`layers.i`, each called with the output of the previous one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Of two heads, over its input or a context."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y = x if context is None else context
        q, k, v = (z.unflatten(-1, (2, -1)).transpose(1, 2) for z in (self.q(x), self.k(y), self.v(y)))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Network(nn.Module):
    """A feed-forward part."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))
