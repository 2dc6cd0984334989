"""Keys and values that modules keep between calls: tensors that are no buffers, written in place,
and buffers that code replaces.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D, H, T = 8, 2, 6
PREFIX = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=2), kv) }"
LORA = "peft 1\nedit q at layer[*].attn.k { h += lora(x, r=2) }"


class Cached(nn.Module):
    """LLaMA's own code, which has a start position. `replaces`: keys are appended instead."""

    replaces = False

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.LayerNorm(D)
        self.cache_k, self.cache_v = torch.zeros(2, T, D).double(), torch.zeros(2, T, D).double()
        self.register_buffer("joined", torch.zeros(2, 0, 2 * D), persistent=False)
        self.start = 0

    def store(self, cache: Tensor, value: Tensor) -> Tensor:
        cache[:, self.start : self.start + value.shape[1]] = value
        return cache[:, : self.start + value.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if self.replaces:
            self.joined = torch.cat((self.joined, torch.cat((k, v), -1)), 1)
            k, v = self.joined.chunk(2, -1)
        else:
            k, v = self.store(self.cache_k.detach(), k), self.store(self.cache_v.detach(), v)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
        causal = torch.ones(x.shape[1], k.shape[2]).tril(k.shape[2] - x.shape[1]).bool()
        weights = (q @ k.mT).masked_fill(~causal, -torch.inf).softmax(-1)
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class Replacing(Cached):
    replaces = True


def by_token(model: Any, x: Tensor) -> Tensor:
    """Token by token."""
    outputs: list[Tensor] = []
    for start in range(x.shape[1]):
        for layer in model.layers:
            layer.start = start
        outputs.append(model(x[:, start : start + 1]))
    for layer in model.layers:
        layer.start = 0
    return torch.cat(outputs, 1)


def test_tensors_that_are_no_buffers_are_read_and_written() -> None:
    torch.manual_seed(0)
    model, x = Layers(Cached(), Cached()).double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    base = model(x)
    assert not peftc.sites(model, sample={"x": x}).untraced
    peftc.compile(LORA, model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    with torch.no_grad():
        whole = model(x)
        assert not torch.allclose(whole, base)
        torch.testing.assert_close(by_token(model, x), whole, rtol=0, atol=1e-10)


def test_code_that_replaces_what_a_later_call_reads() -> None:
    """The next call sees the keys of this one, without the prefix."""
    torch.manual_seed(0)
    model, x = Layers(Replacing(), Replacing()).double().eval(), torch.randn(2, T, D, dtype=torch.float64)
    peftc.compile(PREFIX, model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    empty: list[Any] = [layer.joined for layer in model.layers]
    with torch.no_grad():
        whole = model(x)
        for layer, joined in zip(model.layers, empty, strict=True):
            assert cast(Any, layer).joined.shape == (2, T, 2 * D)
            cast(Any, layer).joined = joined
        torch.testing.assert_close(by_token(model, x), whole, rtol=0, atol=1e-10)
    named = LORA.replace("layer[*].attn.k", '"**.k"')
    peftc.compile(named, Layers(Replacing(), Replacing()).eval(), seed=0, sample={"x": x.float()})


def test_keys_and_values_that_are_joined_have_no_role_and_are_named() -> None:
    """Features are not followed through a join of several Linears: `v` was at the keys' Linear."""
    table = peftc.sites(Layers(Replacing(), Replacing()).eval(), sample={"x": torch.randn(2, T, D)})
    assert not [site for site in table.sites if site.path.endswith((".attn.self.k", ".attn.self.v"))]
    assert {part.module for part in table.unplaced} == {f"layers.{i}.{role}" for i in range(2) for role in "kv"}
