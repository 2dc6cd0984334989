"""A model of layers that are called one after the other."""

from __future__ import annotations

from torch import Tensor, nn


class Layers(nn.Module):
    """`layers.i`, each called with the result of the one before: (batch, tokens, d), or whatever
    they take.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
