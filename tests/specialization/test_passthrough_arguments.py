"""Pass-through arguments: one variant serves all their values, unless the layer reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.installation.record import installation_of
from tests.specialization.test_optional_arguments import Block, model_of

# In the first layer `inner` is between input and stream: its attention is refused (P214).
SPEC = "peft 1\nedit e at layer[1].attn { h += adapter(x, r=2, init=lora) }\n"


class Inner(nn.Module):
    """Keeps its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[object] = []

    def forward(self, x: Tensor, note: object) -> Tensor:
        self.notes.append(note)
        return x * 2


class Layer(Block):
    """Multiplies by a number that each call computes anew: an equal object, not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.scale = 0.7

    def forward(self, x: Tensor, extra: object = None) -> Tensor:
        return super().forward(self.inner(x * (self.scale / 3), extra))


class Looking(Layer):
    """Multiplies by a number that depends on the argument."""

    def forward(self, x: Tensor, extra: object = None) -> Tensor:
        return Block.forward(self, self.inner(x * (1 if extra is None else 1.5), extra))


@pytest.mark.parametrize(("layer", "more"), [(Layer, False), (Looking, True)])
def test_passthrough_arguments(layer: type[Layer], more: bool) -> None:
    base, x = model_of(layer), torch.randn(2, 3, 8, dtype=torch.float64)
    notes = (None, True, False)
    want = [base(x, note) for note in notes]
    model = peftc.compile(SPEC, base, sample={"x": x})
    kind = installation_of(model).regions[0][1]
    model(x)
    count = len(kind.variants)
    for note, value in zip(notes, want, strict=True):
        inner = model.get_submodule("layers.1.inner")
        assert torch.equal(model(x, note), value)
        assert inner.notes[-1] is note
    assert (len(kind.variants) > count) is more
