"""A layer that is a Sequential with names for its parts, of which one has several sub-layers."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

import peftc

D = 8


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(D), nn.Conv2d(D, D, 3, padding=1)
        self.point = nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.point(torch.relu(self.conv(self.norm(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        z = self.norm(y)
        y = y + self.attention(z, z, z)[0]
        y = y + self.mlp(y)
        return y.transpose(1, 2).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = OrderedDict(conv=Convolution(), window=Attention(), grid=Attention())
        self.layers = nn.Sequential(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Stage(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stage(2), Stage(1)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_named_parts_are_one_layer() -> None:
    """Each part was a layer, and of several blocks some were left out."""
    paths = [site.path for site in peftc.sites(Model(), sample={"x": torch.randn(2, D, 4, 4)}).sites]
    assert [path for path in paths if path.endswith("]") and path.count("[") == 1] == [
        f"encoder.layer[{i}]" for i in range(3)
    ]
