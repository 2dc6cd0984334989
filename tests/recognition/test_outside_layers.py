"""What runs outside of the layers: norms of other blocks, and attentions that are no pools."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention

D = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.mlp_norm(x))


class Refinement(nn.Module):
    """No layer: it adds to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


class Model(nn.Module):
    def __init__(self, latents: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.refinement, self.norm, self.head = Refinement(), nn.LayerNorm(D), nn.Linear(D, 3)
        self.latents, self.reader = nn.Parameter(torch.randn(1, latents, D)), Attention(D)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.refinement(x)
        return self.head(self.norm(self.reader(self.latents.expand(len(x), -1, -1), x)))


def test_final_norm() -> None:
    """The norm inside of a block that is no layer was a final norm."""
    sites = peftc.sites(Model(1), sample={"x": torch.randn(2, 4, D)}).sites
    norms = [s.states["w"].weight.module for s in sites if s.path.endswith("norm") and "layer" not in s.path]  # pyright: ignore
    assert norms == ["norm"]


@pytest.mark.parametrize("latents", [1, 3])
def test_attention_of_several_latents_warns(latents: int) -> None:
    """It was left out of `layer[*].attn` in silence. A pool, with one latent, is not meant."""
    unplaced = peftc.sites(Model(latents), sample={"x": torch.randn(2, 4, D)}).unplaced
    assert [module.module for module in unplaced] == ([] if latents == 1 else ["reader"])


class Separable(nn.Module):
    """Attention of linear cost: each place of a patch has the mean of the keys of all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(D, 1 + 2 * D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).split([1, D, D], dim=1)
        context = (key * query.softmax(-1)).sum(-1, keepdim=True)
        return self.out(torch.relu(value) * context.expand_as(value))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.GroupNorm(1, D), nn.GroupNorm(1, D)
        self.mixer = Separable()
        self.mlp = nn.Sequential(nn.Conv2d(D, 2 * D, 1), nn.SiLU(), nn.Conv2d(2 * D, D, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("patches", [1, 4])
def test_sum_over_one_patch(patches: int) -> None:
    """With one patch in the sample, the mixer was a feed-forward network, `out` its `down`."""
    sites = peftc.sites(Blocks(), sample={"x": torch.randn(2, D, 4, patches)}).sites
    assert [s.path for s in sites if s.path.endswith((".ffn", ".mixer"))] == [
        f"encoder.layer[{i}].{kind}" for i in range(2) for kind in ("mixer", "ffn")
    ]
