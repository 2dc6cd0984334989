"""Streams that a layer replaces, or puts together from parts, between its sub-layers; and roles and
norms in styles of original repositories.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers, Network

D, T = 8, 6


class Replaced(nn.Module):
    """TinyViT: a convolution between attention and mlp computes a new stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn, self.mlp, self.conv = Attention(D), Network(D), nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Inner(Replaced):
    """The layer's own sum comes last: what the convolution computes is no stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        y = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + (y + self.mlp(self.norm2(y)))


class Joined(nn.Module):
    """TimeSformer: each half attends with a copy of the first token, whose results are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), Attention(D), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = x[:, :1], x[:, 1:]
        halves = rest.unflatten(1, (2, -1)).flatten(0, 1)
        copies = first.repeat(1, 2, 1).flatten(0, 1).unsqueeze(1)
        y = self.attn(self.norm1(torch.cat((copies, halves), 1)))
        own = y[:, 0].unflatten(0, (-1, 2)).mean(1, True)
        y = y[:, 1:].unflatten(0, (-1, 2)).flatten(1, 2)
        x = torch.cat((first, rest), 1) + torch.cat((own, y), 1)
        return x + self.mlp(self.norm2(x))


class MovingNorm(nn.Module):
    """VITS: a norm of channels, between two transposes in its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.transpose(1, -1), (D,), self.gamma, self.beta).transpose(1, -1)


class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv1d(D, D, 1) for _ in range(4))
        self.norm, self.up, self.down = MovingNorm(), nn.Conv1d(D, 2 * D, 1), nn.Conv1d(2 * D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        weights = (self.q(x).transpose(1, 2) @ self.k(x)).softmax(-1)
        x = self.norm(x + self.o((weights @ self.v(x).transpose(1, 2)).transpose(1, 2)))
        return (x + self.down(self.up(x).relu())).transpose(1, 2)


class Scaled(nn.Module):
    """FLASH: one Linear for queries and keys, each of which scales and shifts its features."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.o = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.gamma, self.beta = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(2, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.einsum("... d, h d -> ... h d", self.qk(x), self.gamma) + self.beta).unbind(-2)
        return x + self.o((q @ k.transpose(1, 2)).softmax(-1) @ self.v(x))


class Projected(Scaled):
    """Matrices of each role behind the Linear, which has none."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(2, D, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.einsum("btd, hde -> bthe", self.qk(x), self.gamma).unbind(-2)
        return x + self.o((q @ k.transpose(1, 2)).softmax(-1) @ self.v(x))


def weights(layer: Callable[[], nn.Module]) -> dict[str, str]:
    """The parameters of the second layer by role."""
    table = peftc.sites(Layers(layer(), layer()), sample={"x": torch.randn(2, T + 1, D)})
    sites = {s.path.partition("layer[1].")[2]: s.states["w"].weight for s in table.sites if "w" in s.states}
    return {
        path.replace(".self", ""): f"{weight.module}.{weight.attribute}".removeprefix("layers.1.")
        for path, weight in sites.items()
        if path and weight is not None
    }


ATTENTION = {f"attn.{role}": f"attn.{role}.weight" for role in "qkvo"} | {"attn.norm": "norm1.weight"}
FFN = {"ffn.up": "mlp.up.weight", "ffn.down": "mlp.down.weight", "ffn.norm": "norm2.weight"}


@pytest.mark.parametrize("layer", [Replaced, Joined])
def test_the_stream_goes_on_in_what_replaces_it(layer: Callable[[], nn.Module]) -> None:
    assert weights(layer).items() >= (ATTENTION | FFN).items()


def test_what_a_later_sum_adds_is_no_stream() -> None:
    own = weights(Inner)
    assert own.items() >= ATTENTION.items()
    assert not any(path.startswith("ffn[") for path in own)


def test_a_norm_between_transposes_of_its_own_code() -> None:
    assert weights(Channels).items() >= {"attn.norm": "norm.gamma", "ffn.up": "up.weight"}.items()


def test_scales_behind_one_linear_of_queries_and_keys() -> None:
    assert weights(Scaled).items() >= {"attn.q": "qk.weight", "attn.k": "qk.weight", "attn.v": "v.weight"}.items()
    assert weights(Projected).items() >= {"attn.q": "gamma", "attn.k": "gamma", "attn.v": "v.weight"}.items()


class QueryBlock(nn.Module):
    """Attention and a network, from three arguments: the sums have the third."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.network, self.norm1, self.norm2 = Network(D), nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        weights = (self.q(query) @ self.k(key).transpose(1, 2)).softmax(-1)
        x = self.norm1(self.o(weights @ self.v(value)) + query)
        return self.norm2(self.network(x) + x)


class Queried(nn.Module):
    """Blocks along space and time, whose results are added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial, self.temporal = QueryBlock(), QueryBlock()

    def forward(self, value: Tensor, key: Tensor, query: Tensor) -> Tensor:
        x = self.spatial(value, key, query) + query
        return self.temporal(x, x, x) + x


class OfQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Queried(), Queried()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x)
        return x


def test_the_stream_is_the_argument_that_sums_have() -> None:
    """With the first argument as the stream, weights had two sites each."""
    table = peftc.sites(OfQueries(), sample={"x": torch.randn(2, 5, D)})
    sites = [site for site in table.sites if site.path.startswith(("encoder.layer[0].", "decoder.layer[0]."))]
    weights = [(site.steps[-1][0], site.module) for site in sites if "w" in site.states and site.steps[-1][0] != "norm"]
    roles = {**{role: role for role in "qkvo"}, "up": "network.up", "down": "network.down"}
    places = (f"layers.0.{part}" for part in ("spatial", "temporal"))
    assert sorted(weights) == sorted((role, f"{at}.{name}") for at in places for role, name in roles.items())
