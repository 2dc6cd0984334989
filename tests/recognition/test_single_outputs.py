"""A Linear with one output has as many entries as a norm has, and is none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc

D = 8


class Layer(nn.Module):
    """A sub-layer behind a gate for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(D), nn.Linear(D, 1, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.gate(y).sigmoid() * self.down(self.up(y).relu())


class Scores(nn.Module):
    """One number for each sequence, as in regression and in reward models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.score = nn.ModuleList([Layer(), Layer()]), nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.score(x.mean(1))


def test_a_linear_with_one_output_is_no_norm() -> None:
    sites = peftc.sites(Scores(), sample={"x": torch.randn(2, 5, D)}).sites
    assert [site.path for site in sites if site.module == "score"] == ["head"]
    assert [site.module for site in sites if site.steps[-1][0] == "norm"] == ["layers.0.norm", "layers.1.norm"]
