"""Feed-forward parts of convolutions over several positions: their Linears' edits, and folds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D = 8
Edges = Mapping[str, Any]
SAME: Edges = {"kernel_size": 3, "padding": 1}
POINTWISE: Edges = {"kernel_size": 1}
CIRCULAR: Edges = {**SAME, "padding_mode": "circular"}


class Block(nn.Module):
    """FastSpeech, with its norm before the network; `down` is of any kernel."""

    def __init__(self, down: Edges) -> None:
        super().__init__()
        self.q, self.k, self.v, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.w_1, self.w_2 = nn.Conv1d(D, 2 * D, 9, padding=4), nn.Conv1d(2 * D, D, **down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ self.v(x)
        return x + self.w_2(torch.relu(self.w_1(self.norm(x).transpose(1, 2)))).transpose(1, 2)


def model_with(down: Edges) -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    return Layers(Block(down), Block(down)).double(), torch.randn(2, 5, D).double()


def compiled(down: Edges, edit: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A base, and a copy with an edit whose parameters are random."""
    base, x = model_with(down)
    model = copy.deepcopy(base)
    peftc.compile(f"peft 1 edit e at layer[*].ffn{edit}", model, sample={"x": x})
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter, std=0.3)
    return base, model, x


def test_up_and_down_multiply_patches() -> None:
    """LoRA at `up` adds B A to its kernel."""
    base, model, x = compiled(SAME, ".up { h += lora(x, r=2, alpha=2) }")
    for i, layer in enumerate(base.layers):  # type: ignore[arg-type]
        lora = [peftc.parameters(model)[f"e/encoder.layer[{i}].ffn.up/lora.{name}"] for name in "BA"]
        layer.w_1.weight.data += (lora[0] @ lora[1]).view_as(layer.w_1.weight)
    torch.testing.assert_close(model(x), base(x))
    assert not peftc.verify(model).findings
    peftc.fold(model)
    torch.testing.assert_close(model(x), base(x))


@pytest.mark.parametrize(
    ("down", "edit", "folds"),
    [
        (SAME, "h *= vector(init=1)", True),
        (SAME, "h += linear(h, bias=false)", True),
        (SAME, "h += linear(h)", False),  # a constant is not added to what the padding reads
        (CIRCULAR, "h += linear(h)", True),
        (POINTWISE, "h += linear(h)", True),
    ],
)
def test_an_edit_of_what_a_convolution_reads_folds(down: Edges, edit: str, folds: bool) -> None:
    base, model, x = compiled(down, f".hidden {{ {edit} }}")
    before = model(x)
    assert not torch.allclose(before, base(x))
    (planned,) = peftc.plan(f"peft 1 edit e at layer[*].ffn.hidden {{ {edit} }}", base, sample={"x": x}).edits
    report = peftc.fold(model)
    assert planned.foldable is folds is (not report.refused)
    torch.testing.assert_close(model(x), before)


def test_convolutions_are_not_widened() -> None:
    _, model, x = compiled(SAME, " { h += adapter(x, r=2) }")
    before = model(x)
    assert [refused.edit for refused in peftc.fold(model, widen=True).refused] == ["e"]
    torch.testing.assert_close(model(x), before)
