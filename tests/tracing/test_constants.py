"""Tensors that code computes from parameters alone, and changes in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D = 8


def write_through_view(bias: Tensor) -> Tensor:
    """Values without a bias; in Swin v2 of torchvision it is the keys."""
    bias = bias.clone()
    bias[2 * D :].zero_()
    return bias


def read_between_writes(bias: Tensor) -> Tensor:
    bias = bias.clone()
    total = bias.sum()
    bias[0] = 3.0
    view = bias[1:]
    bias.mul_(2)
    return bias + total + view.sum()


def read_between_writes_of_a_view(bias: Tensor) -> Tensor:
    whole = torch.ones(4 * D, dtype=bias.dtype)
    part, mean = whole[D:], whole.mean()
    part.add_(bias.clone())
    torch.add(part, 1.0, out=part)
    return part * mean + whole.sum()


class Attention(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.proj, self.change = nn.Linear(D, 3 * D), nn.Linear(D, D), change

    def forward(self, x: Tensor) -> Tensor:
        qkv = nn.functional.linear(x, self.qkv.weight, self.change(self.qkv.bias.detach()))
        q, k, v = qkv.chunk(3, dim=-1)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v))


class Layer(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), Attention(change)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize("change", [write_through_view, read_between_writes, read_between_writes_of_a_view])
def test_writes_happen_in_their_order(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Layers(Layer(change), Layer(change)).double().eval(), torch.randn(2, 5, D, dtype=torch.float64)
    base = model(x)
    peftc.compile("peft 1  edit e at layer[*].attn.q { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    torch.testing.assert_close(model(x), base, rtol=0, atol=1e-12)
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    edited = model(x)
    assert not torch.allclose(edited, base)
    peftc.fold(model)
    torch.testing.assert_close(model(x), edited, rtol=0, atol=1e-10)
