"""A module that stands under two names is one use of its weights; two modules with one weight are
two.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc

D = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.o(torch.softmax(q @ k.mT, -1) @ v)


class Trunk(nn.Module):
    """The layers are `blocks`, and again a part of `trunk`, which is called."""

    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        if tie:
            self.blocks[1].o.weight = self.blocks[0].o.weight  # type: ignore[union-attr]
        self.trunk = nn.Sequential(nn.Linear(D, D), self.blocks, nn.LayerNorm(D))

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


@pytest.mark.parametrize("tie", [False, True])
def test_a_layer_with_two_names_folds_where_its_weights_are_its_own(tie: bool) -> None:
    torch.manual_seed(0)
    model, x = Trunk(tie).double().eval(), torch.randn(2, 5, D, dtype=torch.float64)
    peftc.compile("peft 1\nedit e at layer[0].attn.o { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    with torch.no_grad():
        want = model(x)
        report = peftc.fold(model)
        assert torch.allclose(model(x), want, rtol=0, atol=1e-10)
    assert [fold.edit for fold in report.folded] == ([] if tie else ["e"])
    assert tie == any("tied" in refusal.reason for refusal in report.refused)
