"""An edit whose code takes in the code of a module does not pass by the hooks of that module."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.refusals import refused

# The stream and a value inside: the code of the sub-layer is in that of the layer.
INSIDE = "peft 1  edit e at layer[*].ffn { h += lora(res, r=2) + lora(z, r=2) }"
WEIGHTS = "peft 1  edit e at layer[*].attn.{q, v} { w += lowrank(r=2) }"
REGISTER = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x) for linear in (self.q, self.k, self.v))
        return self.o((q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attn = Attention()
        self.ffn = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sample() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 5, 8)}


def doubled(module: nn.Module, *values: Any) -> None:
    """A hook, which this test never runs."""


def tripled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return 3 * out


@pytest.mark.parametrize("register", REGISTER)
def test_an_edit_around_a_hook_is_refused(register: str) -> None:
    model = Model()
    getattr(model.layers[1].get_submodule("ffn"), register)(functools.partial(doubled))
    error = refused("P426", lambda: peftc.compile(INSIDE, model, seed=0, sample=sample()), model)
    assert "layers.1.ffn" in error.message
    assert any("doubled" in note for note in error.notes)


def test_a_later_hook_is_noticed_at_the_next_call() -> None:
    model, inputs = Model(), sample()
    base = model(**inputs)
    peftc.compile(INSIDE, model, seed=0, sample=inputs)
    edited = model(**inputs)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(**inputs), edited)
    handle = model.layers[1].get_submodule("ffn").register_forward_hook(doubled)
    refused("P426", lambda: model(**inputs))
    with peftc.disabled(model):  # the code of the model itself calls the module
        torch.testing.assert_close(model(**inputs), base)
    handle.remove()
    torch.testing.assert_close(model(**inputs), edited)


@pytest.mark.parametrize("at", ["layer[*].attn.q", "layer[*].ffn", "layer[*].ffn.up"])
def test_a_hook_of_a_module_that_is_called_acts(at: str) -> None:
    model, inputs = Model(), sample()
    for layer in model.layers:
        for name in ("attn.q", "ffn", "ffn.0"):
            layer.get_submodule(name).register_forward_hook(tripled)
    base = model(**inputs)
    peftc.compile(f"peft 1  edit e at {at} {{ h += lora(x, r=2) }}", model, seed=0, sample=inputs)
    torch.testing.assert_close(model(**inputs), base)


def test_a_hook_of_torch_that_computes_a_weight_is_none() -> None:
    model, inputs = Model(), sample()
    for layer in model.layers:
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(layer.get_submodule("attn.q"))
    base = model(**inputs)
    peftc.compile("peft 1  edit e at layer[*].attn.v { w += lowrank(r=2) }", model, seed=0, sample=inputs)
    torch.testing.assert_close(model(**inputs), base)


@pytest.mark.filterwarnings("default")
def test_a_weight_that_the_code_computes_leaves_an_edit_of_the_output() -> None:
    model, inputs = Model(), sample()
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.get_submodule("attn.q"))
    base = model(**inputs)
    with pytest.raises(peftc.PeftcError, match="P404") as caught:  # of the compilation, or of the first call
        peftc.compile(WEIGHTS, model, seed=0, sample=inputs)(**inputs)
    assert caught.value.diagnostics[0].help == "edit its `h`"
    model = Model()
    for layer in model.layers:
        nn.utils.parametrizations.weight_norm(layer.get_submodule("attn.q"))
    peftc.compile("peft 1  edit e at layer[*].attn.{q, v} { h += lora(x, r=2) }", model, seed=0, sample=inputs)
    torch.testing.assert_close(model(**inputs), base)
