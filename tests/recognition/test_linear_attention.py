"""Attention without a softmax over scores: which product is of keys, and which of values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests.layers import Layers

D = 12


def by_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (kᵀ v), with a softmax of features and one of tokens."""
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(v kᵀ) q, features before tokens."""
    return (v.mT @ F.relu(k) @ F.relu(q).mT).mT


def by_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bhij", q, k).tril()
    return (weights / weights.abs().sum(-1, keepdim=True).clamp(min=1)) @ v


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    scale = 1 / torch.einsum("bhnd,bhd->bhn", q, k.sum(-2))
    return torch.einsum("bhde,bhnd,bhn->bhne", torch.einsum("bhnd,bhne->bhde", k, v), q, scale)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sums = torch.einsum("bhnd,bhne->bhned", k, v).cumsum(2)
    return torch.einsum("bhned,bhnd->bhne", sums, q)


class Block(nn.Module):
    def __init__(self, attend: object) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (nn.Linear(D, D) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (3, 4)).transpose(1, 2) for f in (self.a, self.b, self.c))
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("attend", [by_features, transposed, by_weights, normalised, causal])
def test_roles_are_told_by_the_products(attend: object) -> None:
    model = Layers(Block(attend), Block(attend)).eval()
    table = peftc.sites(model, sample={"x": torch.randn(2, 5, D)})
    modules = {site.path: site.module for site in table.sites}
    names = {role: modules.get(f"encoder.layer[1].attn.self.{role}") for role in "qkvo"}
    assert names == {"q": "layers.1.a", "k": "layers.1.b", "v": "layers.1.c", "o": "layers.1.out"}
    assert "kv" not in next(site.states for site in table.sites if site.path == "encoder.layer[1].attn.self")


def test_products_of_one_token_are_no_attention() -> None:
    """The same without the running sum: each token is computed from itself alone."""

    def bilinear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhned,bhnd->bhne", torch.einsum("bhnd,bhne->bhned", k, v), q)

    table = peftc.sites(Layers(Block(bilinear), Block(bilinear)).eval(), sample={"x": torch.randn(2, 5, D)})
    assert not any("attn" in site.path for site in table.sites)
