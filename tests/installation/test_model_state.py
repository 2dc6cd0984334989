"""The state of a model is equal for equal models, and for no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from peftc.installation.model_state import flags_of, own_modules, state_of
from tests import zoo

SPEC = "peft 1\nedit a at layer[*].attn.q | layer[*].ffn { h += lora(x, r=2) }\n"


class Part(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.scale, self.kinds = number, 1.0, [torch.float32]
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))


class Whole(nn.Module):
    def __init__(self, numbers: tuple[int, ...] = (1, 1, 1)) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, numbers))
        self.head = nn.Linear(4, 2, bias=False)


def rename(model: Any) -> None:
    model.parts[2]._modules = {"other": model.parts[2].up, "down": model.parts[2].down}


def exchange_order(model: Any) -> None:
    model.parts[2]._modules = dict(reversed(model.parts[2]._modules.items()))


def share_a_module(model: Any) -> None:
    model.parts[2].up = model.parts[2].down


def share_one_of_another_part(model: Any) -> None:
    model.parts[2].up = model.parts[1].up


def share_one_of_the_first_part(model: Any) -> None:
    model.parts[2].up = model.parts[0].up


def tie(model: Any) -> None:
    model.parts[2].up.weight = model.parts[1].up.weight


def tie_to_the_first(model: Any) -> None:
    model.parts[2].up.weight = model.parts[0].up.weight


def overlap(model: Any) -> None:
    model.parts[2].up.weight = nn.Parameter(model.parts[1].up.weight.detach())


def change_a_type(model: Any) -> None:
    model.parts[2].number = True


def change_a_float(model: Any) -> None:
    model.parts[2].number = 1.0


def change_a_value(model: Any) -> None:
    model.parts[2].scale = 2.0


def change_a_list(model: Any) -> None:
    model.parts[2].kinds.append(torch.float64)


def rename_an_attribute(model: Any) -> None:
    model.parts[2].other = vars(model.parts[2]).pop("number")


def change_a_class(model: Any) -> None:
    model.parts[2].up.__class__ = type("Other", (nn.Linear,), {})


def change_a_dtype(model: Any) -> None:
    model.parts[2].double()


def transpose(model: Any) -> None:
    model.parts[2].up.weight = nn.Parameter(model.parts[2].up.weight.detach().clone().t())


def remove_a_bias(model: Any) -> None:
    model.parts[2].up.bias = None


def remove_a_buffer(model: Any) -> None:
    del model.parts[2].mask


def remove_a_part(model: Any) -> None:
    del model.parts[2]


def remove_a_child(model: Any) -> None:
    model.parts[2].up = None


def delete_a_child(model: Any) -> None:
    del model.parts[2].up


def replace_a_parameter_by_a_buffer(model: Any) -> None:
    parameters, buffers = model.head._parameters, model.head._buffers
    buffers["weight"] = parameters.pop("weight")


def forget_a_buffer(model: Any) -> None:
    model.parts[2].register_buffer("mask", model.parts[2].mask, persistent=False)


def freeze(model: Any) -> None:
    model.parts[2].up.weight.requires_grad = False


CHANGES: list[Callable[[Any], None]] = [
    rename,
    exchange_order,
    share_a_module,
    share_one_of_another_part,
    share_one_of_the_first_part,
    tie,
    tie_to_the_first,
    overlap,
    change_a_type,
    change_a_float,
    change_a_value,
    change_a_list,
    rename_an_attribute,
    change_a_class,
    change_a_dtype,
    transpose,
    remove_a_bias,
    remove_a_buffer,
    remove_a_part,
    remove_a_child,
    delete_a_child,
    replace_a_parameter_by_a_buffer,
    forget_a_buffer,
    freeze,
]


def test_models_that_differ_anywhere_have_different_states() -> None:
    models = [Whole() for _ in CHANGES]
    for change, model in zip(CHANGES, models, strict=True):
        change(model)
    states = [state_of(Whole()), state_of(Whole((1, 2, 1))), *map(state_of, models)]
    assert None not in states
    for i, one in enumerate(states):
        assert all(one != other for other in states[:i]), CHANGES[i - 2]


@pytest.mark.parametrize("change", CHANGES)
def test_equal_models_have_equal_states(change: Callable[[Any], None]) -> None:
    models = Whole(), Whole()
    for model in models:
        change(model)
    first, second = (state_of(model) for model in models)
    if change is not change_a_class:  # two classes of one name
        assert first == second
    assert first is not None
    assert first.flags == flags_of(own_modules(models[0]))


def test_a_further_equal_part_is_described_by_a_number() -> None:
    shallow, deep = state_of(Whole((1,) * 3)), state_of(Whole((1,) * 30))
    assert shallow is not None
    assert deep is not None
    assert len(shallow.modules) == len(deep.modules)
    assert shallow.parts == deep.parts


def test_a_hook_is_not_comparable() -> None:
    model: Any = Whole()
    model.parts[2].up.register_forward_hook(lambda *_: None)
    assert state_of(model) is None


@pytest.mark.parametrize("name", ["llama", "bart", "t5", "gpt2"])
def test_edits_change_the_flags_alone(name: str) -> None:
    model: Any = zoo.build(name)
    before = state_of(model)
    after = state_of(peftc.compile(SPEC, model, seed=0))
    assert before is not None
    assert after is not None
    assert (after.modules, after.parts) == (before.modules, before.parts)
    assert after.flags == flags_of(own_modules(model)) == (False,) * len(before.flags)
    assert state_of(peftc.remove(model)) == before
