"""Layers that leave their last sum to the next layer; results of a network behind a gate; numbers
in code that are complex.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Attention, Layers, Network

D, T = 8, 6


class AddingNorm(nn.Module):
    """vLLM: a norm adds what the layer before has left to add, and returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else x + residual
        return nn.functional.rms_norm(residual, (D,), self.weight), residual


class Deferred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind, self.attn, self.mlp = AddingNorm(), AddingNorm(), Attention(D), Network(D)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x, residual = self.before(x, residual)
        x, residual = self.behind(self.attn(x), residual)
        return self.mlp(x), residual


class DeferredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Deferred() for _ in range(2)), AddingNorm()

    def forward(self, x: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual)
        return self.norm(x, residual)[0]


class Gated(nn.Module):
    """RWKV: a gate of the stream behind `down`."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.key = Attention(D), nn.LayerNorm(D), nn.Linear(D, 2 * D)
        self.value, self.receptance = nn.Linear(2 * D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        y = self.norm(x)
        return x + self.receptance(y).sigmoid() * self.value(self.key(y).relu().square())


class Complex(nn.Module):
    """A rotation by a complex number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(D), Network(D)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * (0.6 + 0.8j))
        x = x + self.attn(turned.flatten(-2))
        return x + self.mlp(x)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "deferred": (DeferredModel, {"attn": "attn", "ffn": "mlp", "ffn.up": "mlp.up", "ffn.down": "mlp.down"}),
    "gated": (lambda: Layers(Gated(), Gated()), {"ffn.up": "key", "ffn.down": "value"}),
    "complex": (lambda: Layers(Complex(), Complex()), {"attn": "attn", "ffn": "mlp"}),
}


@pytest.mark.parametrize("case", CASES)
def test_edits_are_at_the_modules_of_their_roles(case: str) -> None:
    torch.manual_seed(0)
    build, places = CASES[case]
    model, x = build().double(), torch.randn(2, T, D).double()
    for role, module in places.items():
        reference, edited = copy.deepcopy(model), copy.deepcopy(model)
        for layer in reference.layers:
            layer.get_submodule(module).register_forward_hook(lambda module, args, out: 3 * out)
        peftc.compile(f"peft 1\nedit e at layer[*].{role} {{ h *= vector(init=3) }}", edited, sample={"x": x})
        assert torch.allclose(edited(x=x), reference(x=x), rtol=0, atol=1e-12), role


def test_norms_that_add_are_norms() -> None:
    model = DeferredModel()
    table = peftc.sites(model, sample={"x": torch.randn(2, T, D)})
    norms = [(site.path, site.module) for site in table.sites if site.path.endswith("norm") and "layer[1]" in site.path]
    assert norms == [
        ("encoder.layer[1].attn.self.norm", "layers.1.before"),
        ("encoder.layer[1].ffn.norm", "layers.1.behind"),
    ]
