"""Masks, indices and scores that an attention computes for the layers behind it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import peftc
from peftc.dataflow.operations import has_side_effects, is_in_place

D, T = 8, 6


class Attention(nn.Module):
    """Its scores decide which tokens the attentions behind it may see."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.norm, self.qkv, self.o, self.keeps = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D), keeps

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(~mask[:, None], -1e9).softmax(-1)
        seen = weights.mean(dim=1)
        if self.keeps == "and":
            mask = mask & (seen >= 0.1)
        elif self.keeps == "where":
            mask = torch.where(seen >= 0.1, mask, False)
        else:
            mask = torch.zeros_like(mask).scatter(1, seen.topk(4).indices, True)
        return self.o(weights @ v), mask


class Model(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        networks = (nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)) for _ in "abc")
        self.layers = nn.ModuleList(nn.ModuleList([Attention(keeps), network]) for network in networks)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        for attention, network in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            out, mask = attention(x, mask)
            x = x + out
            x = x + network(x) * mask[..., None]
        return x


@pytest.mark.parametrize("keeps", ["and", "where", "topk"])
def test_each_layer_has_the_projections_of_its_own_attention(keeps: str) -> None:
    table = peftc.sites(Model(keeps), sample={"x": torch.randn(2, T, D)})
    modules = {site.path.partition(".")[2]: site.module for site in table.sites}
    for i in range(3):
        for role, name in {"q": "0.qkv", "k": "0.qkv", "v": "0.qkv", "o": "0.o"}.items():
            assert modules[f"layer[{i}].attn.self.{role}"] == f"layers.{i}.{name}"
        assert modules[f"layer[{i}].ffn.up"] == f"layers.{i}.1.1"
    assert not table.unplaced
    assert not table.untraced


class Scores(nn.Module):
    """Adds its scores to those of the attentions behind it (RealFormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(D), *(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, earlier: Tensor | float) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2) + earlier
        return self.o(scores.softmax(-1) @ self.v(y)), scores


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Scores(), nn.LayerNorm(D)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor | float = 0.0
        for attention, norm in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            out, scores = attention(x, scores)
            x = norm(x + out)
        return x


def test_linears_of_earlier_scores_are_no_sites_of_a_later_layer() -> None:
    table = peftc.sites(Residual(), sample={"x": torch.randn(2, T, D)})
    own = {(site.path.partition("[")[2][0], site.module.split(".")[1]) for site in table.sites if ".attn." in site.path}
    assert own == {("0", "0"), ("1", "1"), ("2", "2")}


@pytest.mark.parametrize(("function", "writes"), [(operator.and_, False), (operator.or_, False), (operator.iand, True)])
def test_the_underscore_of_an_operator_says_nothing_of_writes(function: Callable[..., Any], writes: bool) -> None:
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("mask"), graph.placeholder("other")))
    assert is_in_place(node) == has_side_effects(node) == writes
