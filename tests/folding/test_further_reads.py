"""Layers whose code calls a Linear and computes with its weight besides: an edit of `h` at one of
the two uses does not fold, and one of `w` acts at both.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests.layers import Attention, Layers

D = 8
X = torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """`down` is the transposed `up`."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(D)
        self.norm, self.up, self.bias = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(self.norm(x))

    def ffn(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def down(self, z: Tensor) -> Tensor:
        return F.linear(z, self.up.weight.T, self.bias)


class ByMethod(Tied):
    def down(self, z: Tensor) -> Tensor:
        return F.linear(z, self.up.weight.t(), self.bias)


class ByProduct(Tied):
    def down(self, z: Tensor) -> Tensor:
        return z @ self.get_parameter("up.weight") + self.bias


class InList(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.up.weight]

    def down(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weights[0].mT, self.bias)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)

    def back(self, z: Tensor) -> Tensor:
        return F.linear(z, self.up.weight.T)


class InPart(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        del self.up

    def ffn(self, x: Tensor) -> Tensor:
        return self.part.back(F.gelu(self.part(x)))


BLOCKS = [Tied, ByMethod, ByProduct, InList, InPart]


def edited(block: type[nn.Module], edit: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Layers(block(), block()).double().eval()
    peftc.compile(f"peft 1  edit e at {edit}", model, seed=0, sample={"x": X})
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return model, model(X)


@pytest.mark.parametrize("place", ["layer[*].ffn.up", "layer[*].ffn.down", "layer[*].ffn.up | layer[*].ffn.down"])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_edit_at_one_use_does_not_fold(block: type[nn.Module], place: str) -> None:
    model, out = edited(block, f"{place} {{ h += lora(x, r=2) }}")
    (refused,) = peftc.fold(model).refused
    assert "a fold would change both uses" in refused.reason
    assert torch.equal(model(X), out)


@pytest.mark.parametrize("role", ["up", "down"])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_edit_of_the_weight_acts_at_both_uses(block: type[nn.Module], role: str) -> None:
    model, out = edited(block, f"layer[*].ffn.{role} {{ w += lowrank(r=2) }}")
    folded = copy.deepcopy(model)
    assert not peftc.fold(folded).refused
    torch.testing.assert_close(folded(X), out, rtol=0, atol=1e-10)


class Gate(Tied):
    """A Linear without a role, whose weight the code around it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * F.linear(torch.tanh(self.gate(x)), self.gate.weight.T).sigmoid()


def test_nor_does_one_at_a_linear_without_a_role() -> None:
    model, out = edited(Gate, '"layers.*.gate" { h += lora(x, r=2) }')
    (refused,) = peftc.fold(model).refused
    assert "`layers.0` computes with `layers.0.gate.weight`, too" in refused.reason
    assert torch.equal(model(X), out)


def test_a_ffn_with_a_tied_weight_grows_no_hidden_units() -> None:
    model, out = edited(Tied, "layer[*].ffn { h += adapter(x, r=2, act=gelu) }")
    assert peftc.fold(model, widen=True).refused
    assert torch.equal(model(X), out)
