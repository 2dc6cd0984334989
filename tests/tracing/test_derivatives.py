"""Layers that transform functions or take derivatives: PyTorch's code for them takes proxies for
tensors, so the layer is refused, with the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D = 8
X = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))


def energy(x: Tensor) -> Tensor:
    return (x**2).sum()


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.function is None else self.function(x)
        return x + self.down(torch.relu(self.up(self.norm(x))))


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda x: torch.vmap(torch.tanh, in_dims=1, out_dims=1)(x),
    "grad": lambda x: torch.func.grad(energy)(x),
    "vjp": lambda x: x + torch.func.vjp(energy, x)[0],
    "jvp": lambda x: x + torch.func.jvp(energy, (x,), (x,))[0],
    "jacrev": lambda x: torch.func.jacrev(energy)(x),
    "jacfwd": lambda x: torch.func.jacfwd(energy)(x),
    "functionalize": lambda x: x + torch.func.functionalize(energy)(x),
    "jacobian": lambda x: torch.autograd.functional.jacobian(energy, x),
}
# Those of functions that hold the input, at values that are no part of it.
HOLDING: dict[str, Callable[[Tensor], Any]] = {
    "vmap of a holder": lambda x: torch.vmap(lambda v: x * v)(torch.ones(3)).mean(0),
    "grad of a holder": lambda x: x + torch.func.grad(lambda v: (x * v).sum())(torch.ones(D)),
    "vjp of a holder": lambda x: x + torch.func.vjp(lambda v: x * v, torch.ones(D))[0],
    "jacrev of a holder": lambda x: torch.func.jacrev(lambda v: (x * v).sum((0, 1)))(torch.ones(D))[:1] + x,
    "functionalize of a holder": lambda x: x + torch.func.functionalize(lambda v: x * v)(torch.ones(D)),
    "jacobian of a holder": lambda x: x + torch.autograd.functional.jacobian(lambda v: (x * v).sum(), torch.ones(D)),
}
FUNCTIONS |= HOLDING


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, of `jvp`
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_of_a_function_is_refused_with_its_line(name: str) -> None:
    model = Layers(Layer(FUNCTIONS[name]), Layer()).eval()
    base = model(X)
    (untraced,) = peftc.sites(model, sample={"x": X}).untraced
    assert "a transform of a function" in untraced.reason
    assert "test_derivatives.py:" in untraced.reason
    assert f'"{name}": lambda x' in untraced.reason
    with pytest.raises(peftc.PeftcError, match="P214"):
        peftc.compile("peft 1  edit e at layer[*].ffn { h += lora(x, r=1) }", model, sample={"x": X})
    peftc.compile('peft 1  edit e at "layers.*.up" { h += lora(x, r=1) }', model, seed=0, sample={"x": X})
    other = X[:, :3]
    assert torch.equal(model(X), base)
    out = model(other)
    peftc.remove(model)
    assert torch.equal(model(other), out)


class Asks(Layer):
    """Its code asks whether a tensor that it has computed requires a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return 2 * x if x.requires_grad else x


def test_whether_a_result_requires_a_gradient_is_asked_when_it_runs() -> None:
    model = Layers(Asks(), Asks()).eval().requires_grad_(False)
    base = model(X)
    peftc.compile("peft 1  edit e at layer[*].ffn { h += lora(x, r=1) }", model, seed=0, sample={"x": X})
    assert not torch.equal(model(X), base)
    with torch.no_grad():
        assert torch.equal(model(X), base)
    twice = model.layers[0](X)
    with torch.no_grad():
        assert torch.equal(twice, 2 * model.layers[0](X))
