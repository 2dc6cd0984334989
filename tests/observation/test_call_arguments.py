"""Arguments are bound once for calls with the same objects, and anew where code sees others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from peftc.observation import call_arguments
from peftc.observation.call_arguments import CallArguments


class Layer(nn.Module):
    def forward(self, x: torch.Tensor, states: Any = None, scale: float = 1.0) -> torch.Tensor:
        return x * scale


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules whose arguments were bound."""
    modules: list[nn.Module] = []
    bind = call_arguments.bind_arguments

    def counting(forward: Any, module: nn.Module, *rest: Any) -> dict[str, Any]:
        modules.append(module)
        return bind(forward, module, *rest)

    monkeypatch.setattr(call_arguments, "bind_arguments", counting)
    return modules


def test_calls_with_the_same_objects_are_bound_once(bound: list[nn.Module]) -> None:
    calls, x, states = CallArguments(), torch.zeros(2, 3), (torch.zeros(1), None)
    layers = Layer(), Layer()
    first, second = (calls.of(layer, (x,), {"states": states}) for layer in layers)
    assert first.exact_key == second.exact_key
    assert first.first_input == second.first_input == (("x",), (2, 3))
    assert bound == [layers[0]]


def test_another_object_or_another_name_is_another_call() -> None:
    calls, layer, x = CallArguments(), Layer(), torch.zeros(2, 3)
    keys = [
        calls.of(layer, args, kwargs).exact_key
        for args, kwargs in (
            ((x,), {}),
            ((torch.zeros(3, 2),), {}),
            ((x, x), {}),
            ((x,), {"scale": 2.0}),
            ((x,), {"states": 2.0}),
        )
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("states", [[], {}, ([],)], ids=["list", "dict", "list in a tuple"])
def test_what_is_filled_in_between_is_seen(states: Any) -> None:
    calls, layer, x = CallArguments(), Layer(), torch.zeros(2, 3)
    before = calls.of(layer, (x,), {"states": states}).exact_key
    inner = states[0] if isinstance(states, tuple) else states
    if isinstance(inner, list):
        inner.append(x)
    else:
        inner["key"] = x
    assert calls.of(layer, (x,), {"states": states}).exact_key != before


def test_a_tensor_that_changed_in_place_is_seen() -> None:
    calls, layer, x = CallArguments(), Layer(), torch.zeros(2, 3)
    changes: list[Callable[[], object]] = [lambda: None, lambda: x.unsqueeze_(0), lambda: x.requires_grad_()]
    keys: list[str] = []
    for change in changes:
        change()
        call = calls.of(layer, (x,), {})
        assert call.first_input == (("x",), tuple(x.shape))
        keys.append(call.exact_key)
    assert len(set(keys)) == len(keys)
