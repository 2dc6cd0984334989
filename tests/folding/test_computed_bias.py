"""Products with a parameter itself: no module adds the bias, and a fold must not lose one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests.layers import Layers

D = 8


class Block(nn.Module):
    """`bias`: "joined" of a parameter and zeros, as BEiT's, or "none"."""

    def __init__(self, bias: str) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False)
        self.v_bias, self.proj = nn.Parameter(torch.randn(D)), nn.Linear(D, D)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(self.v_bias)
        bias = torch.cat((zeros, zeros, self.v_bias)) if self.bias == "joined" else None
        q, k, v = F.linear(self.norm(x), weight=self.qkv.weight, bias=bias).chunk(3, dim=-1)
        return x + self.proj(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])


@pytest.mark.parametrize(
    ("bias", "equation", "folds"),
    [
        ("joined", "h *= vector(init=1)", False),
        ("joined", "h += vector(init=0)", False),
        ("joined", "h += lora(x, r=2)", True),
        ("joined", "w += lowrank(r=2)", True),
        ("none", "h *= vector(init=1)", True),
        ("none", "h += vector(init=0)", False),
    ],
)
def test_a_fold_keeps_what_the_code_adds(bias: str, equation: str, folds: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 5, D), Layers(Block(bias), Block(bias)).eval()
    peftc.compile(f"peft 1\nedit e at layer[*].attn.v {{ {equation} }}", model, seed=0, sample={"x": x})
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn_like(parameter))
        before = model(x)
        report = peftc.fold(model)
        torch.testing.assert_close(model(x), before)
    assert bool(report.folded) is folds
