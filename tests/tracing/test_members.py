"""What code reads of Python's values in modules, and in objects that modules hold. Another value is
another call: edited code computes what the model's own code does. Layers that differ in one are of
different types.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

import peftc
from tests.layers import Attention, Network

D = 8
SAMPLE = {"x": torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
Code = Callable[[Any, Tensor], Tensor]


@dataclass
class Config:
    norm: int = 0
    scale: float = 2.0
    is_second: bool = False


@dataclass(frozen=True)
class Frozen:
    norm: int = 0


class Nested:
    def __init__(self) -> None:
        self.inner = Config()

    @property
    def norm(self) -> int:
        return self.inner.norm


class Items(dict[str, Any]):
    """Configurations of many libraries: keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Kind(Enum):
    FIRST = 0
    SECOND = 1


class Layer(nn.Module):
    constant = 0

    def __init__(self, code: Code, value: Any) -> None:
        super().__init__()
        self.attention, self.network = Attention(D), Network(D)
        self.norms = nn.ModuleList([nn.LayerNorm(D) for _ in range(3)])
        for norm in self.norms:
            nn.init.normal_(norm.weight)  # pyright: ignore[reportArgumentType]
        self.code, self.value, self._private, self.plan = code, value, value, Kind.FIRST

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.code(self, x))
        return x + self.network(x)


class Layers(nn.Module):
    def __init__(self, code: Code, values: tuple[Any, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(code, value) for value in values])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def repeat(layer: Any, x: Tensor) -> Tensor:
    for i in range(layer.value):
        x = layer.norms[i](x)
    return x


def repeat_and_scale(layer: Any, x: Tensor) -> Tensor:
    n = layer.value
    for i in range(n):
        x = layer.norms[i](x)
    return x * n


def double(x: Tensor) -> Tensor:
    return 2 * x


# code that reads a value, a value, and another one
MEMBERS: dict[str, tuple[Code, Any, Any]] = {
    "an index": (lambda layer, x: layer.norms[layer.value](x), 0, 2),
    "a private index": (lambda layer, x: layer.norms[layer._private](x), 0, 2),
    "a slice": (lambda layer, x: nn.Sequential(*layer.norms[: layer.value])(x), 1, 3),
    "a range": (repeat, 1, 3),
    "a range, and a factor": (repeat_and_scale, 1, 3),
    "a root": (lambda layer, x: x * math.sqrt(layer.value), 4, 9.0),
    "a root of a float": (lambda layer, x: x * math.sqrt(layer.value), 4.0, 9.0),
    "a text": (lambda layer, x: layer.norms.get_submodule(f"{layer.value}")(x), 1, 2),
    "a key": (lambda layer, x: layer.norms[{5: 0, 6: 1}[layer.value]](x), 5, 6),
    "an integer": (lambda layer, x: layer.norms[int(layer.value)](x), 0.4, 1.4),
    "a rounded number": (lambda layer, x: layer.norms[round(layer.value)](x), 0.4, 1.4),
    "bits": (lambda layer, x: layer.norms[layer.value & 1](x), 1, 2),
    "a private flag": (lambda layer, x: layer.norms[0](x) if layer._private else x, True, False),
    "a private factor": (lambda layer, x: layer._private * x, 2.0, 3.0),
    "a list": (lambda layer, x: layer.norms[layer.value[0]](x), [0], [2]),
    "a text in a list": (lambda layer, x: layer.norms[0](x) if "b" in layer.value else x, ["a"], ["b"]),
    "a dictionary": (lambda layer, x: layer.norms[layer.value["k"]](x), {"k": 0}, {"k": 1}),
    "a set": (lambda layer, x: layer.norms[1 if 1 in layer.value else 0](x), set(), {1}),
    "nested tuples": (lambda layer, x: layer.norms[layer.value[0][0]](x), ((0, 1), (1,)), ((2, 1), (1,))),
    "a function of torch": (lambda layer, x: layer.value(layer.norms[0](x)), torch.relu, torch.tanh),
    "a function": (lambda layer, x: layer.value(layer.norms[0](x)), double, lambda x: 3 * x),
    "a dtype": (lambda layer, x: 2 * x if layer.value == torch.float32 else 3 * x, torch.float32, torch.float64),
    "a member of an enumeration": (lambda layer, x: 2 * x if layer.value is Kind.FIRST else x, Kind.FIRST, Kind.SECOND),
    "None": (lambda layer, x: 2 * x if layer.value is None else 3 * x, None, 3),
    "a dataclass": (lambda layer, x: layer.norms[layer.value.norm](x), Config(), Config(norm=2)),
    "a factor in a dataclass": (lambda layer, x: layer.value.scale * x, Config(), Config(scale=3.0)),
    "a flag in a dataclass": (lambda layer, x: x if layer.value.is_second else 2 * x, Config(), Config(is_second=True)),
    "a frozen dataclass": (lambda layer, x: layer.norms[layer.value.norm](x), Frozen(), Frozen(2)),
    "a namespace": (
        lambda layer, x: layer.norms[layer.value.norm](x),
        SimpleNamespace(norm=0),
        SimpleNamespace(norm=1),
    ),
    "arguments": (lambda layer, x: layer.norms[layer.value.norm](x), Namespace(norm=0), Namespace(norm=1)),
    "a configuration of transformers": (
        lambda layer, x: layer.norms[layer.value.norm](x),
        PretrainedConfig(norm=0),
        PretrainedConfig(norm=1),
    ),
    "a list in a configuration": (
        lambda layer, x: layer.norms[layer.value.norms[0]](x),
        PretrainedConfig(norms=[0]),
        PretrainedConfig(norms=[1]),
    ),
    "keys as attributes": (lambda layer, x: layer.norms[layer.value.norm](x), Items(norm=0), Items(norm=1)),
}


def compiled(code: Code, *values: Any) -> tuple[Any, Any]:
    """A base, and a copy with an edit that changes nothing; all of a layer is rewritten."""
    torch.manual_seed(0)
    base = Layers(code, values).double().eval()
    model = peftc.compile("peft 1  edit e at layer[*].attn { h += adapter(res, r=2) }", deepcopy(base), sample=SAMPLE)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            parameter.zero_()
    return base, model


def set_values(value: Any, *models: Any) -> None:
    for layer in (layer for model in models for layer in model.layers):
        layer.value = layer._private = value


@torch.no_grad()
@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "compiled"])
def test_a_call_has_the_values_that_there_are(name: str, in_graph: bool) -> None:
    code, value, other = MEMBERS[name]
    base, model = compiled(code, value, value)
    run = torch.compile(model, backend="eager") if in_graph else model
    before = base(**SAMPLE)
    torch.testing.assert_close(run(**SAMPLE), before, atol=1e-12, rtol=0)
    set_values(other, base, model)
    assert not torch.equal(base(**SAMPLE), before)
    torch.testing.assert_close(run(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)
    set_values(value, base, model)
    torch.testing.assert_close(run(**SAMPLE), before, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", MEMBERS)
def test_layers_of_other_values_have_their_own_code(name: str) -> None:
    code, value, other = MEMBERS[name]
    base, model = compiled(code, value, other)
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


@pytest.mark.parametrize("private", [False, True])
def test_modules_that_a_layer_picks_by_index_are_where_it_calls_them(private: bool) -> None:
    """Sites, and edits by name: what no layer calls is refused."""
    name = "_private" if private else "value"
    torch.manual_seed(0)
    base = Layers(lambda layer, x: layer.heads[getattr(layer, name)](x), (0, 1)).double().eval()
    for layer in base.layers:
        layer.heads = nn.ModuleList([Attention(D), Attention(D)]).double()
    model = deepcopy(base)
    modules = [site.module for site in peftc.sites(model, sample=SAMPLE).sites if site.path.endswith(".q")]
    assert {"layers.0.heads.0.q", "layers.1.heads.1.q"} <= {*modules}
    assert not {"layers.0.heads.1.q", "layers.1.heads.0.q"} & {*modules}
    spec = 'peft 1  edit e at "layers.1.heads.{}.q" {{ h += lora(x, r=2) }}'
    with pytest.raises(peftc.PeftcError, match="no forward of the sample calls"):
        peftc.compile(spec.format(0), deepcopy(base), sample=SAMPLE)
    peftc.compile(spec.format(1), model, sample=SAMPLE)
    with torch.no_grad():
        for parameter in peftc.parameters(model).values():
            nn.init.normal_(parameter)
    assert not torch.equal(model(**SAMPLE), base(**SAMPLE))


CHANGES: dict[str, tuple[Code, Callable[[], Any], Callable[[Any], object]]] = {
    "an entry of a list": (
        lambda layer, x: layer.norms[layer.value[0]](x),
        lambda: [0],
        lambda v: v.append(v.pop() + 1),
    ),
    "a member of a set": (lambda layer, x: x if 1 in layer.value else 2 * x, set, lambda v: v.add(1)),
    "a key": (lambda layer, x: layer.norms[layer.value["k"]](x), lambda: {"k": 0}, lambda v: v.update(k=1)),
    "a member": (lambda layer, x: layer.norms[layer.value.norm](x), Config, lambda v: setattr(v, "norm", 2)),
    "a member of a member": (
        lambda layer, x: layer.norms[layer.value.norm](x),
        Nested,
        lambda v: setattr(v.inner, "norm", 2),
    ),
    "all of a member": (
        lambda layer, x: layer.norms[layer.value.norm](x),
        Nested,
        lambda v: setattr(v, "inner", replace(v.inner, norm=2)),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_value_that_changes_in_place_is_seen(name: str) -> None:
    code, make, change = CHANGES[name]
    base, model = compiled(code, make(), make())
    before = base(**SAMPLE)
    torch.testing.assert_close(model(**SAMPLE), before, atol=1e-12, rtol=0)
    for layer in (*base.layers, *model.layers):
        change(layer.value)
    assert not torch.equal(base(**SAMPLE), before)
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


ABSENT: dict[str, Code] = {
    "asked for": lambda layer, x: 2 * x if hasattr(layer, "extra") else x,
    "with a default": lambda layer, x: layer.norms[getattr(layer, "extra", 0)](x),
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_attribute_that_is_set_later_is_seen(name: str) -> None:
    base, model = compiled(ABSENT[name], None, None)
    before = base(**SAMPLE)
    torch.testing.assert_close(model(**SAMPLE), before, atol=1e-12, rtol=0)
    for layer in (*base.layers, *model.layers):
        layer.extra = 1
    assert not torch.equal(base(**SAMPLE), before)
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


def test_a_constant_of_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    base, model = compiled(lambda layer, x: layer.norms[layer.constant](x), None, None)
    before = base(**SAMPLE)
    monkeypatch.setattr(Layer, "constant", 1)
    assert not torch.equal(base(**SAMPLE), before)
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


def test_layers_that_differ_in_an_index_alone_share_their_code() -> None:
    """An index that the graph passes on decides nothing."""
    torch.manual_seed(0)
    model = Layers(lambda layer, x: layer.norms[0](x) * layer.value, (1, 2, 3)).double()
    sites = peftc.sites(model, sample=SAMPLE)
    assert len({site.kind for site in sites.sites if site.steps[-1][0] == "layer"}) == 1


@pytest.mark.parametrize(("factors", "kinds"), [((2, 2, 2), 1), ((2, 3, 2), 2)])
def test_layers_with_equal_functions_share_their_code(factors: tuple[int, ...], kinds: int) -> None:
    def multiply(factor: int) -> Callable[[Tensor], Tensor]:
        return lambda x: factor * x

    base, model = compiled(lambda layer, x: layer.value(layer.norms[0](x)), *map(multiply, factors))
    sites = peftc.sites(base, sample=SAMPLE)
    assert len({site.kind for site in sites.sites if site.steps[-1][0] == "layer"}) == kinds
    torch.testing.assert_close(model(**SAMPLE), base(**SAMPLE), atol=1e-12, rtol=0)


def test_objects_have_their_classes_after_an_analysis() -> None:
    value = Config()
    _, model = compiled(lambda layer, x: layer.value.scale * x, value, value)
    assert type(value) is Config
    assert {type(layer.value) for layer in model.layers} == {Config}
