"""What code of a rewritten layer reads outside of modules may change after `compile`: functions,
global variables, closures, members of classes and objects. The next call of the model has the new
ones, as a model has that is compiled then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests.layers import Attention, Layers

D = 8
SAMPLE = {"x": torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
HERE = sys.modules[__name__]
Patch = Callable[[pytest.MonkeyPatch], object]

SCALE = 1.5
ACTIVATIONS: dict[str, Any] = {"act": torch.tanh}
function = torch.sin


class Settings:
    offset = 0.5

    def __init__(self) -> None:
        self.bias = 0.25


SETTINGS = Settings()


def helper(x: Tensor) -> Tensor:
    return x * SCALE + Settings.offset + SETTINGS.bias


def multiplied(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


closure = multiplied(2.0)
torch_attention = F.scaled_dot_product_attention


class FeedForward(nn.Module):
    FACTOR = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 0.1

    @property
    def power(self) -> float:
        return 1.25

    def forward(self, x: Tensor) -> Tensor:
        hidden = closure(helper(function(ACTIVATIONS["act"](self.up(x)))))
        return self.down(F.softsign(self.shifted(hidden)) * self.power * self.FACTOR)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attention, self.ffn = Attention(D), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.ffn(self.norms[1](x))


def new_forward(self: Any, x: Tensor, scale: float = 3.0) -> Tensor:
    return self.down(torch.relu(self.up(x)) * scale)


PATCHES: dict[str, Patch] = {
    "a constant": lambda m: m.setattr(HERE, "SCALE", 3.0),
    "a function of torch in a variable": lambda m: m.setattr(HERE, "function", torch.cos),
    "a function of the model": lambda m: m.setattr(HERE, "helper", lambda x: x - 1),  # pyright: ignore
    "the code of a function": lambda m: m.setattr(helper, "__code__", (lambda x: x - SCALE).__code__),  # pyright: ignore
    "a closure": lambda m: m.setattr(HERE, "closure", multiplied(4.0)),
    "a variable of a closure": lambda m: m.setattr(closure.__closure__[0], "cell_contents", 5.0),  # pyright: ignore
    "an entry of a dictionary": lambda m: m.setitem(ACTIVATIONS, "act", torch.relu),
    "a member of a global class": lambda m: m.setattr(Settings, "offset", 2.0),
    "a member of a global object": lambda m: m.setattr(SETTINGS, "bias", 3.0),
    "a member of a class": lambda m: m.setattr(FeedForward, "FACTOR", 2.0),
    "a static method": lambda m: m.setattr(FeedForward, "shifted", staticmethod(lambda x: x - 3)),  # pyright: ignore
    "a property": lambda m: m.setattr(FeedForward, "power", property(lambda self: 9.0)),  # pyright: ignore
    "a forward": lambda m: m.setattr(FeedForward, "forward", new_forward),
    "a function of torch": lambda m: m.setattr(F, "softsign", torch.relu),
}
SPECS = {
    "hidden": "edit a at layer[*].ffn.hidden { h += adapter(x, r=2) }",
    "a Linear": "edit a at layer[*].ffn.down { h += lora(x, r=2) }",
    "a sub-layer": "edit a at layer[*].ffn { h += adapter(x, r=2) }",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return Layers(Layer(), Layer()).double().eval()


def compiled(spec: str) -> nn.Module:
    model = peftc.compile(f"peft 2\n\n{spec}\n", network(), seed=0, sample=SAMPLE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_a_call_has_the_code_of_its_time(patch: Patch, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(spec)
    before = model(**SAMPLE)
    with peftc.disabled(model):
        base_before = model(**SAMPLE)
    with monkeypatch.context() as context:
        patch(context)
        expected = compiled(spec)(**SAMPLE)
        assert not torch.allclose(expected, before)
        assert torch.equal(model(**SAMPLE), expected)
        assert torch.equal(deepcopy(model)(**SAMPLE), expected)
        with peftc.disabled(model):
            assert torch.equal(model(**SAMPLE), network()(**SAMPLE))
    assert torch.equal(model(**SAMPLE), before)
    with peftc.disabled(model):
        assert torch.equal(model(**SAMPLE), base_before)


@torch.no_grad()
@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_compiled_code_has_it_too(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = compiled(SPECS["hidden"])
    run = torch.compile(model, backend="eager")
    before = run(**SAMPLE)
    patch(monkeypatch)
    assert torch.allclose(run(**SAMPLE), compiled(SPECS["hidden"])(**SAMPLE))
    assert not torch.allclose(run(**SAMPLE), before)


def test_attention_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other libraries take the place of `F.scaled_dot_product_attention`."""
    model = compiled("edit a at layer[*].attn.heads { h *= vector(init=2) }")
    before = model(**SAMPLE)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: torch_attention(*args, **kw) * 2)  # pyright: ignore
    after = compiled("edit a at layer[*].attn.heads { h *= vector(init=2) }")(**SAMPLE)
    assert torch.equal(model(**SAMPLE), after)
    assert not torch.allclose(after, before)


def test_equal_values_need_no_new_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled(SPECS["hidden"])
    model(**SAMPLE)
    variants = [kind.variants for kind in kinds(model)]
    monkeypatch.setattr(HERE, "SCALE", float("1.5"))
    model(**SAMPLE)
    assert all(own is kind.variants for own, kind in zip(variants, kinds(model), strict=True))
    assert all(kind.reads.are_current() for kind in kinds(model))


def kinds(model: nn.Module) -> list[Any]:
    every = (getattr(type(module), "_peftc_kind", None) for module in model.modules())
    return list(dict.fromkeys(kind for kind in every if kind is not None))
