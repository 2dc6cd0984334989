"""Functions of `torch.jit.script` have no Python code to inline: a trace preserves their calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D = 8
SPEC = """peft 1
edit a at layer[*].ffn { h += adapter(x, r=3, act=relu) }
edit b at layer[*].ffn.down { h += lora(x, r=2) }
"""


def scaled(x: Tensor, by: int) -> Tensor:
    return x / torch.sqrt(torch.tensor(float(x.size(-1) * by)))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.size(-1) // 2
    return x[..., :half], x[..., half:]


def compiled(function: Callable[..., Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = halves(scaled(self.up(self.norm(x)), by=2))
        return x + self.down(torch.sigmoid(gate) * value)


scripted_scaled, scripted_halves = compiled(scaled), compiled(halves)


class Scripted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = scripted_halves(scripted_scaled(self.up(self.norm(x)), by=2))
        return x + self.down(torch.sigmoid(gate) * value)


@pytest.mark.parametrize("grad", [True, False])
def test_edits_of_a_layer_that_calls_scripted_functions(grad: bool) -> None:
    torch.manual_seed(0)
    written = Layers(Layer(), Layer())
    model = Layers(Scripted(), Scripted())
    model.load_state_dict(written.state_dict())
    x = torch.randn(2, 5, D)
    for each in (written, model):
        peftc.compile(SPEC, each.eval(), seed=0, sample={"x": x})
    generator = torch.Generator().manual_seed(0)
    for name, parameter in peftc.parameters(written).items():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        peftc.parameters(model)[name].data.copy_(parameter)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x), written(x))
        torch.testing.assert_close(model(x[:1, :3]), written(x[:1, :3]))
    if grad:
        for each in (model, written):
            each(x).square().sum().backward()
        for name, parameter in peftc.parameters(written).items():
            torch.testing.assert_close(peftc.parameters(model)[name].grad, parameter.grad)
