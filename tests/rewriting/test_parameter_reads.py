"""Code that calls a Linear in one mode and computes with its weight in another: an edit of it acts in both, or is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from peftc.rewriting.parameter_reads import own_parameters, parameter_reads
from tests.laws.harness import randomise
from tests.rewriting.test_modes import mode

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LONG = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MODES = ("train", "eval", "no_grad", "inference_mode")
EDITS = {
    "h": "h += lora(x, r=2, alpha=4)",
    "sequential": "h += adapter(h, r=2)",
    "w": "w += lowrank(r=2)",
}


def by_function(fc: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, fc.weight, fc.bias)


def fastest(fc: nn.Linear, x: Tensor) -> Tensor:
    return fc(x) if torch.is_grad_enabled() else by_function(fc, x)


Way = Callable[["Layer", Tensor], Tensor]
WAYS: dict[str, Way] = {
    "call with gradients": lambda s, x: s.fc(x) if torch.is_grad_enabled() else F.linear(x, s.fc.weight, s.fc.bias),
    "function with gradients": lambda s, x: F.linear(x, s.fc.weight, s.fc.bias) if torch.is_grad_enabled() else s.fc(x),
    "call in training": lambda s, x: s.fc(x) if s.training else F.linear(x, s.fc.weight, s.fc.bias),
    "function in training": lambda s, x: F.linear(x, s.fc.weight, s.fc.bias) if s.training else s.fc(x),
    "call of what is trained": lambda s, x: s.fc(x) if s.fc.weight.requires_grad else F.linear(x, s.fc.weight, s.fc.bias),
    "function in inference mode": lambda s, x: by_function(s.fc, x) if torch.is_inference_mode_enabled() else s.fc(x),
    "function for a long input": lambda s, x: by_function(s.fc, x) if x.shape[1] > 6 else s.fc(x),
    "another function": lambda s, x: fastest(s.fc, x),
    "a method": lambda s, x: s.fast(x),
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def fast(self, x: Tensor) -> Tensor:
        layer = self.fc
        return layer(x) if torch.is_grad_enabled() else F.linear(x, getattr(layer, "weight"), layer.bias)  # noqa: B009

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.inner(self.norm(x))))


def layer_class(way: Way) -> type[Layer]:
    return type("WayLayer", (Layer,), {"inner": way})


PLAIN = layer_class(lambda s, x: s.fc(x))


class Model(nn.Module):
    def __init__(self, cls: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(cls() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(cls: type[nn.Module], text: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model(cls).double()
    model = peftc.compile(f'peft 1\nedit e at "layers.*.fc" {{ {text} }}', model, 0, sample={"x": X})
    randomise(peftc.parameters(model))
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("edit", EDITS)
def test_one_effect_on_every_path(way: str, edit: str) -> None:
    """As on a model that only calls."""
    plain, model = compiled(PLAIN, EDITS[edit]), compiled(layer_class(WAYS[way]), EDITS[edit])
    for given in (X, LONG):
        for how in MODES:
            with mode(how, plain), mode(how, model):
                assert torch.allclose(model(given), plain(given), rtol=0, atol=1e-10), (how, given.shape)
                with peftc.disabled(plain):
                    assert not torch.allclose(model(given), plain(given), rtol=0, atol=1e-3)
    out = model.train()(X)
    out.sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())


class Around(nn.Module):
    """A model that computes with the weights of its layers itself, where no gradients are needed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PLAIN() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = layer(x)
            else:
                inner = torch.relu(F.linear(layer.norm(x), layer.fc.weight, layer.fc.bias))
                x = x + layer.out(inner)
        return x


def test_what_is_around_the_layers_is_refused() -> None:
    model = Around().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(peftc.PeftcError) as caught:
        peftc.compile('peft 1\nedit e at "layers.*.fc" { w += lowrank(r=2) }', model, sample={"x": X})
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "P435"
    assert diagnostic.span is not None
    assert model.state_dict().keys() == before.keys()
    peftc.compile('peft 1\nedit e at "layers.*.out" { w += lowrank(r=2) }', model, sample={"x": X})


class Asking(nn.Module):
    """What asks for the kind of a weight, and reads those of others or its own, does not read it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.other, self.weight = nn.Linear(D, D), nn.Linear(D, D), nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.fc.weight, Tensor) and x.dtype != self.fc.weight.dtype and self.fc.bias is not None:
            x = x.to(self.fc.weight.dtype)
        return F.linear(self.fc(x) * self.weight, self.other.weight)


@pytest.mark.parametrize(
    ("cls", "region", "names"),
    [
        (Asking, "fc", []),
        (Asking, "other", [("other", "weight")]),
        (Asking, "", []),
        (Around, "layers.1.fc", [("fc", "weight"), ("fc", "bias")]),
        (Around, "layers.1", [("fc", "weight"), ("fc", "bias")]),
        (Around, "layers.1.out", []),
        (layer_class(WAYS["another function"]), "fc", [("weight",), ("bias",)]),
    ],
)
def test_reads_in_code(cls: Any, region: str, names: list[tuple[str, ...]]) -> None:
    model = cls()
    parameters = own_parameters(model.get_submodule(region), region, recurse=True) if region else ["weight"]
    assert [read.names for read in parameter_reads(model, parameters)] == names
