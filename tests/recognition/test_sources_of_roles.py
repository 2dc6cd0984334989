"""Roles whose values have several sources: an earlier layer, another token, two calls of a norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc

D, H, T = 8, 2, 5
functional: Any = nn.functional


class Attention(nn.Module):
    """Values are mixed with those of the first layer; keys and values pass one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_kv = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.k, self.v, self.o, self.mix = (nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        v = self.v(self.norm_kv(y))
        if first is not None:
            mix = self.mix(y).sigmoid()
            v = v * mix + first * (1 - mix)
        q, k, values = (z.unflatten(-1, (H, -1)).transpose(1, 2) for z in (self.q(y), self.k(self.norm_kv(x)), v))
        return self.o(functional.scaled_dot_product_attention(q, k, values).transpose(1, 2).flatten(2)), v


class Recurrence(nn.Module):
    """A minimal GRU: each state is between the one before it and a token's own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.hidden(x).chunk(2, dim=-1)
        state, states = torch.zeros_like(hidden[:, 0]), list[Tensor]()
        for t in range(x.shape[1]):
            state = torch.lerp(state, hidden[:, t], gate[:, t].sigmoid())
            states.append(state)
        return self.out(torch.stack(states, dim=1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleList([Attention(), Recurrence(), nn.LayerNorm(D)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for attention, recurrence, norm in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            out, values = attention(x, first)
            first = values if first is None else first
            x = x + out
            x = x + recurrence(norm(x))
        return x


X = torch.randn(1, T, D)


@pytest.mark.parametrize(
    ("path", "modules"),
    [
        ("attn.self.v", [f"layers.{i}.0.v" for i in range(3)]),
        ("attn.self.norm[0]", [f"layers.{i}.0.norm" for i in range(3)]),
        ("attn.self.norm[1]", [f"layers.{i}.0.norm_kv" for i in range(3)]),
        ("attn.self.norm[2]", []),
        ("mixer.norm", [f"layers.{i}.2" for i in range(3)]),
        ("ffn.up", []),
    ],
)
def test_a_role_has_the_weight_of_its_own_layer(path: str, modules: list[str]) -> None:
    sites = peftc.sites(Model(), sample={"x": X}).sites
    assert [site.module for site in sites if site.path.endswith(f"].{path}")] == modules


def test_each_layer_has_its_own_values() -> None:
    """An edit of `v` acts on the Linear of its layer, and folds into that."""
    model = Model().double().eval()
    x = X.double()
    peftc.compile("peft 1  edit e at layer[1].attn.v { w += lowrank(r=1) }", model, seed=0, sample={"x": x})
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.normal_()
        out = model(x)
        peftc.fold(model)
    torch.testing.assert_close(model(x), out, rtol=0, atol=1e-10)
    changed = changed_parameters(model, Model().double())
    assert changed == {"layers.1.0.v.weight"}


def changed_parameters(one: nn.Module, other: nn.Module) -> set[str]:
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    return {name for (name, p), q in pairs if not torch.equal(p, q)}
