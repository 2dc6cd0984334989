"""Models whose classes have an `__init_subclass__`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import peftc

SPEC = "peft 1\n\nedit a at layer[*].ffn { h += adapter(x, r=4, init=lora) }\n"
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, ffn: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ffn() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_classes_of_a_registry_are_the_users() -> None:
    class Registry(nn.Module):
        classes: ClassVar[dict[str, type[nn.Module]]] = {}

        def __init_subclass__(cls, *, kind: str) -> None:
            Registry.classes[kind] = cls

    class Own(Ffn, Registry, kind="own"):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    model = Stack(Own)
    before = model(X)
    peftc.compile(SPEC, model, sample={"x": X})
    assert torch.equal(model(X), before)
    for parameter in peftc.parameters(model).values():
        nn.init.constant_(parameter, 0.1)
    assert not torch.equal(model(X), before)
    assert Registry.classes == {"own": Own}
    peftc.remove(model)
    assert type(model.layers[0]) is Own
    assert torch.equal(model(X), before)


def doubled(cls: Any) -> None:
    """Doubles what the forward of a class returns, once."""
    forward = cls.forward

    @functools.wraps(forward)
    def twice(self: nn.Module, x: Tensor) -> Tensor:
        return forward(self, x) * (2 if type(self).forward is twice else 1)

    cls.forward = twice


def test_a_forward_is_wrapped_again() -> None:
    class Own(Ffn):
        def __init_subclass__(cls) -> None:
            doubled(cls)

    class Double(Own):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    model = Stack(Double)
    before = model(X)
    peftc.compile(SPEC, model, sample={"x": X})
    assert torch.equal(model(X), before)


def test_a_hook_that_wraps_and_takes_arguments_is_refused() -> None:
    class Own(Ffn):
        def __init_subclass__(cls, *, kind: str) -> None:
            doubled(cls)

    class Double(Own, kind="double"):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.relu(self.up(x)))

    with pytest.raises(peftc.PeftcError, match="__init_subclass__"):
        peftc.compile(SPEC, Stack(Double), sample={"x": X})
