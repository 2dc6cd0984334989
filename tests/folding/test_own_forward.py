"""Modules that have a weight, and a forward of their own: a fold trusts no class by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.addressing.sites import WeightRef
from peftc.folding.own_forward import computes_product
from tests.layers import Layers

D = 8


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Normed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input, dim=-1), self.weight, self.bias)


class Casting(nn.Linear):
    """As openai-whisper's Linear."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype), None if self.bias is None else self.bias.to(input.dtype))


class Stored(nn.Module):
    """The weight is (in, out), which a square one does not show."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(d_in, d_out)), nn.Parameter(torch.randn(d_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Limited(nn.Linear):
    """As the EEGNet of braindecode: rows of a norm over 4 are scaled. Those of the base are not."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=4.0)
        return super().forward(input)


class Clipped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.clamp(-1, 1), self.bias)


class Block(nn.Module):
    def __init__(self, q: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.kv, self.o = q, nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.up, self.down = up, nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        k, v = self.kv(y).chunk(2, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y)[:, None], k[:, None], v[:, None])[:, 0])
        return x + self.down(F.relu(self.up(self.norm2(x))))


SPECS = (
    "edit e at layer[*].attn.q { h += lora(x, r=2) }",
    "edit e at layer[*].ffn.up { h += lora(x, r=2) }",
    'edit e at "**.q" { h += lora(x, r=2) }',
    "edit e at layer[*].ffn { h += adapter(x, r=2, act=relu) }",
)


@pytest.mark.parametrize(
    ("kind", "folds"),
    [
        (nn.Linear, True),
        (Casting, True),
        (Scaled, False),
        (Normed, False),
        (Stored, True),
        (Limited, False),
        (Clipped, False),
    ],
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_fold_is_what_the_model_computed(kind: type[nn.Linear], folds: bool, spec: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    model = Layers(*(Block(kind(D, D), kind(D, 2 * D)) for _ in range(2))).double().eval()
    peftc.compile(f"peft 1\n{spec}", model, seed=0, sample={"x": x})
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn_like(parameter))
        before = model(x)
        report = peftc.fold(model, widen=True)
        torch.testing.assert_close(model(x), before, rtol=0, atol=1e-10)
    assert bool(report.folded) is folds


@torch.no_grad()
def test_a_check_changes_no_weight() -> None:
    model = peftc.compile(
        f"peft 1\n{SPECS[1]}",
        Layers(Block(Limited(D, D), Limited(D, 2 * D))),
        seed=0,
        sample={"x": torch.randn(2, 5, D)},
    )
    cast(Any, model.layers)[0].up.weight.mul_(100)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not peftc.fold(model).folded
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def limited_in_place(layer: Any) -> None:
    layer.up.weight.data = F.normalize(layer.up.weight.data, dim=1)


def limited_under_no_grad(layer: Any) -> None:
    with torch.no_grad():
        layer.up.weight.clamp_(-0.1, 0.1)


class LimitedByItsBlock(Block):
    limit: Callable[[Any], None]

    def forward(self, x: Tensor) -> Tensor:
        type(self).limit(self)
        return super().forward(x)


@torch.no_grad()
@pytest.mark.parametrize("limit", [limited_in_place, limited_under_no_grad])
@pytest.mark.parametrize("index", ["*", "1"])
def test_a_block_limits_the_weight_of_its_linear(limit: Any, index: str) -> None:
    class Limiting(LimitedByItsBlock):
        pass

    Limiting.limit = limit
    torch.manual_seed(0)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    model = Layers(*(Limiting(nn.Linear(D, D), nn.Linear(D, 2 * D)) for _ in range(2))).double().eval()
    model(x)
    peftc.compile(f"peft 1\nedit e at layer[{index}].ffn.up {{ h += lora(x, r=2) }}", model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        parameter.add_(torch.randn_like(parameter))
    before = model(x)
    assert not peftc.fold(model).folded
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "folds"), [(Casting, True), (Scaled, False)])
def test_a_weight_that_is_a_buffer_is_compared_as_it_is(kind: type[nn.Linear], folds: bool) -> None:
    """It takes no other values, and is no reason to call the forward another one."""
    linear = kind(D, D)
    weight = linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    assert computes_product(linear, WeightRef("", "weight")) is folds
