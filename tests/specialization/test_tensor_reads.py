"""Generated code reads parameters in the tables of their modules, and sees what replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import peftc
from peftc.specialization.tensor_reads import compile_reads
from tests import zoo

LORA = "h += lora(x, r=2)"
DORA = "w = magnitude(w + lowrank(r=2))"


def edited_linear(equation: str = LORA) -> tuple[nn.Module, nn.Linear, Tensor]:
    """A model, one of its edited Linears, and an input of that."""
    model = zoo.build("llama", torch.float64)
    peftc.compile(f"peft 1\n\nedit a at layer[0].attn.q {{ {equation} }}\n", model, seed=0)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.uniform_(0.5, 1.5)
    linear = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(linear, nn.Linear)
    return model, linear, torch.ones(1, 3, linear.in_features, dtype=torch.float64)


def form_of(linear: nn.Module) -> nn.Module:
    """The module of LoRA."""
    return next(module for module in linear.modules() if "A" in dict(module.named_parameters(recurse=False)))


@pytest.mark.parametrize("equation", [LORA, DORA, "h *= vector()", "h += adapter(x, r=2)"])
def test_no_parameter_is_searched_for(equation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, linear, x = edited_linear(equation)
    linear(x)
    names = {name.rpartition(".")[2] for name, _ in linear.named_parameters() if ".peftc." in f".{name}"}
    searched: list[str] = []
    search: Any = nn.Module.__getattr__
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: searched.append(name) or search(self, name))
    linear(x)
    assert names
    assert names.isdisjoint(searched)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def double_by_parametrization(module: nn.Module, name: str) -> None:
    parametrize.register_parametrization(module, name, Doubled())


def double_as_plain_attribute(module: nn.Module, name: str) -> None:
    value = getattr(module, name)
    delattr(module, name)
    setattr(module, name, 2 * value.detach())


def double_in_the_table(module: nn.Module, name: str) -> None:
    vars(module)["_parameters"][name] = nn.Parameter(2 * getattr(module, name).detach())


WAYS = [double_by_parametrization, double_as_plain_attribute, double_in_the_table]


@pytest.mark.parametrize("double", WAYS)
def test_what_replaces_a_parameter_is_seen(double: Callable[[nn.Module, str], None]) -> None:
    _, linear, x = edited_linear()
    base, before = nn.functional.linear(x, linear.weight, linear.bias), linear(x)
    double(form_of(linear), "B")
    torch.testing.assert_close(linear(x), base + 2 * (before - base))
    assert not torch.equal(before, base)


def test_what_replaces_the_weight_is_seen() -> None:
    _, linear, x = edited_linear()
    before, base = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    vars(linear)["_parameters"]["weight"] = nn.Parameter(2 * linear.weight.detach())
    torch.testing.assert_close(linear(x), before + nn.functional.linear(x, linear.weight) / 2)
    assert not torch.equal(before, base)


def test_functional_call_is_seen() -> None:
    model, linear, x = edited_linear()
    before, base = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    name = next(n for n, _ in linear.named_parameters() if n.endswith(".B"))
    other = torch.func.functional_call(linear, {name: 2 * linear.get_parameter(name)}, (x,))
    torch.testing.assert_close(other, base + 2 * (before - base))
    assert model is not None


def test_lines_and_other_expressions_stay() -> None:
    source = "def f(m, weight):\n    y = m.weight\n\n    z = n.weight + 'm.weight'\n    m.weight = y\n    return y"
    code = compile_reads(source, "f", {"m.weight"})
    (function,) = (constant for constant in code.co_consts if hasattr(constant, "co_names"))
    lines = [line for *_, line in function.co_lines() if line is not None]
    assert sorted(set(lines)) == [1, 2, 4, 5, 6]
    assert function.co_names.count("_peftc_read") == 1
    assert {"n", "weight"} <= {*function.co_names}
