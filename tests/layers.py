"""A model of layers in sequence."""

from __future__ import annotations

from torch import Tensor, nn


class Layers(nn.Module):
    """`layers.i`, each called with the output of the previous one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
