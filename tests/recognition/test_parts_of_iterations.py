"""Layers in a loop, of which a later one reads what an earlier one computed beside the stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention

D = 8


class Induced(nn.Module):
    """A few tokens attend to all, and all to the result of these."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(D), Attention(D), Attention(D)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        induced = self.first(tokens, y)
        return x + self.second(y, induced), tokens + induced


class Message(nn.Module):
    """Two networks of one layer: of the stream, and of what else passes from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))
        self.places = nn.Sequential(nn.Linear(D, 2 * D), nn.SiLU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.nodes(x - places), places + self.places(x)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tokens = nn.Linear(D, D), nn.Parameter(torch.randn(1, 3, D))
        self.layers = nn.ModuleList([nn.ModuleList([Induced(), Message()]) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, places, tokens = self.embed(x), x, self.tokens.expand(len(x), -1, -1)
        for attention, message in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x, tokens = attention(x, tokens)
            x, places = message(x, places)
        return x, places


def test_sites_are_of_their_own_layer() -> None:
    """Layers were experts of each other, and an attention had the `o` of an earlier layer."""
    table = peftc.sites(Graph(), sample={"x": torch.randn(2, 5, D)})
    numbers: set[tuple[int | None, str]] = set()
    for site in table.sites:
        if (state := site.states.get("w")) is not None and state.weight is not None:
            layer = next((number for name, number in site.steps if name == "layer"), None)
            if layer is not None:
                numbers.add((layer, state.weight.module.split(".")[1]))
    assert numbers == {(i, str(i)) for i in range(3)}
    assert not any(name in ("experts", "router") for site in table.sites for name, _ in site.steps)
