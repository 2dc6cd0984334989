"""Queries, keys and values that code writes into one tensor, piece by piece, and reads as parts."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.addressing.sites import Site
from tests.layers import Layers

D, H = 8, 2
X = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 12), nn.Linear(12, D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.parts(self.norm(x)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


class Slices(Block):
    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        buffer = x.new_empty(*x.shape[:-1], 3 * D)
        buffer[..., :D] = self.q(x)
        buffer[..., D : 2 * D] = self.k(x)
        buffer[..., 2 * D :] = self.v(x)
        return buffer.chunk(3, -1)


class Copies(Block):
    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.empty(3, *x.shape, dtype=x.dtype)
        for i, linear in enumerate((self.q, self.k, self.v)):
            buffer[i].copy_(linear(x))
        return buffer[0], buffer[1], buffer[2]


class Unbound(Block):
    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        buffer = x.new_zeros(*x.shape[:2], 3, D)
        for i, linear in enumerate((self.q, self.k, self.v)):
            buffer[:, :, i] = linear(x)
        return buffer.unbind(2)


class Cache(Block):
    """Keys and values are in the first rows of a longer tensor."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        keys, values = x.new_zeros(4, 9, D), x.new_zeros(4, 9, D)
        keys[: len(x), : x.shape[1]] = self.k(x)
        values[: len(x), : x.shape[1]] = self.v(x)
        return self.q(x), keys[: len(x), : x.shape[1]], values[: len(x), : x.shape[1]]


def model_of(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Layers(block(), block()).double().eval()


@pytest.mark.parametrize("block", [Slices, Copies, Unbound, Cache])
def test_a_part_of_a_buffer_is_what_was_written_there(block: type[Block]) -> None:
    model, plain = model_of(block), model_of(Block)
    sites = {site.path.rpartition("attn.self.")[2]: site.module for site in _sites(block)}
    assert [sites[role] for role in "qkvo"] == [f"layers.1.{role}" for role in "qkvo"]
    base = model(X)
    for one in (model, plain):
        spec = "peft 1  edit e at layer[*].attn.q | layer[*].attn.k | layer[*].attn.v { h += lora(x, r=2) }"
        peftc.compile(spec, one, seed=0, sample={"x": X})
        assert torch.allclose(one(X), base, rtol=0, atol=1e-10)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in peftc.parameters(one).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    out = model(X)
    torch.testing.assert_close(out, plain(X), rtol=0, atol=1e-10)
    folded = copy.deepcopy(model)
    assert not peftc.fold(folded).refused
    torch.testing.assert_close(folded(X), out, rtol=0, atol=1e-10)
    peftc.remove(model)
    assert torch.equal(model(X), base)


class Views(Block):
    """The parts are taken before there is anything in them."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.empty(3, *x.shape, dtype=x.dtype)
        for part, linear in zip([buffer[i] for i in range(3)], (self.q, self.k, self.v), strict=True):
            part.copy_(linear(x))
        return buffer[0], buffer[1], buffer[2]


def test_a_write_to_a_view_is_one_to_its_part() -> None:
    sites = {site.path.rpartition("attn.self.")[2]: site.module for site in _sites(Views)}
    assert [sites[role] for role in "qkv"] == ["layers.1.q", "layers.1.k", "layers.1.v"]


def _sites(block: type[Block]) -> Iterable[Site]:
    return peftc.sites(model_of(block), sample={"x": X}).sites


class Overwritten(Slices):
    """The parts are of a value that is computed from the buffer."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.cat(super().parts(x), -1)
        buffer[..., D:] *= 0.5
        whole = x.new_empty(*x.shape[:-1], 3 * D)
        whole[..., : 2 * D] = buffer[..., D:]  # shifted
        whole[..., 2 * D :] = self.q(x)  # LINE
        return (whole * 2).chunk(3, -1)


def test_an_attention_without_q_says_at_which_line() -> None:
    model = model_of(Overwritten)
    with pytest.raises(peftc.PeftcError, match="P201") as refusal:
        peftc.plan("peft 1  edit e at layer[*].attn.q { h += lora(x, r=1) }", model, sample={"x": X})
    assert "its `attn` has no `q`" in str(refusal.value)
    assert "test_filled_buffers.py:" in str(refusal.value)
    assert 'name the module by a pattern in quotes, such as `"layers.*.' in str(refusal.value)
    assert "did you mean" not in str(refusal.value)
