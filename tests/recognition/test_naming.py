"""Names outside the layers: the stack of a final norm, and unique names for stacks and Linears."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from peftc.recognition.layers import Stack
from peftc.recognition.non_layer_sites import stack_of
from peftc.semantics.checks.edits import is_tower
from peftc.syntax import ast
from tests.layers import Layers

D = 8
functional: Any = nn.functional


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.up, self.down = (nn.Linear(D, D) for _ in range(6))

    def mix(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context)))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x + self.mix(x, x if context is None else context)
        return x + self.down(torch.relu(self.up(x)))


class Flat(nn.Module):
    """Two stacks in one module, each followed by a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList([Layer(), Layer()]) for _ in range(2))
        self.first_norm, self.second_norm = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        context = x
        for layer in self.first:
            context = layer(context)
        context = self.first_norm(context)
        for layer in self.second:
            x = layer(x, context)
        return self.second_norm(x)


def test_a_final_norm_belongs_to_one_stack() -> None:
    table = peftc.sites(Flat(), sample={"x": torch.randn(2, 5, D)})
    norms = {s.path: s.module for s in table.sites if s.steps[-1][0] == "norm"}
    assert norms == {"encoder.norm": "first_norm", "decoder.norm": "second_norm"}


def test_an_embedding_belongs_to_the_innermost_enclosing_stack() -> None:
    anatomy: Any = SimpleNamespace(
        stacks=[Stack("outer", "model.layers", [], [], []), Stack("inner", "model.part.layers", [], [], [])]
    )
    assert [stack_of(name, anatomy) for name in ("model.embed", "model.part.embed", "embed")] == [
        "outer",
        "inner",
        None,
    ]


class LayerNamedList(nn.Module):
    """Two lists of layers; one has the name `layer`, like the site of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Module()
        self.parts.layer, self.parts.more = (nn.ModuleList([Layer(), Layer()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layers in (self.parts.layer, self.parts.more):
            for layer in layers:
                x = layer(x)
        return x


def test_a_stack_does_not_get_the_name_of_a_site_in_it() -> None:
    model, sample = LayerNamedList(), {"x": torch.randn(2, 5, D)}
    layers = [s.path for s in peftc.sites(model, sample=sample).sites if s.steps[-1][0] == "layer"]
    assert layers == [f"{stack}.layer[{i}]" for stack in ("parts_layer", "more") for i in (0, 1)]
    text = "peft 1\nedit e at parts_layer.layer[*].attn.q { h += lora(x, r=1) }"
    assert len(peftc.plan(text, model, sample=sample).edits[0].sites) == 2


def test_names_of_stacks_join_words() -> None:
    for name, expected in {"parts_layer": True, "r_layers": True, "encodr": False, "qformer": True}.items():
        selector = peftc.parse(f"peft 1\nedit e at {name}.layer[*].attn {{ h += adapter(x, r=1) }}").statements[0]
        assert isinstance(selector, ast.Edit)
        assert isinstance(selector.selector, ast.Path)
        assert is_tower(selector.selector, 0) == expected


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(D, D), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x).sigmoid())


class Inner(Layer):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.mix(x, x)


class Gated(nn.Module):
    """Two Linears of one name, both outside the module with the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.one, self.other = Inner(), Part(), Part()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.one(x) * self.other(x)


def test_linears_of_one_name_have_unique_sites() -> None:
    table = peftc.sites(Layers(Gated(), Gated()), sample={"x": torch.randn(2, 5, D)})
    above = "encoder.layer[0].attn.self."
    names = [s.path.removeprefix(above) for s in table.sites if s.path.startswith(above) and "linear" in s.path]
    assert names == ["one.linear", "other.linear"]


class Twice(nn.Module):
    """One Linear computes keys of all tokens, and again of some; another is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        again = self.inner.k(x.mean(1, keepdim=True))
        return x + self.inner(x) * self.scale(x).sigmoid() + self.scale(again)


def test_a_linear_that_is_called_twice_has_one_name_and_folds() -> None:
    model, sample = Layers(Twice(), Twice()), {"x": torch.randn(2, 5, D)}
    sites = [s for s in peftc.sites(model, sample=sample).sites if s.path.startswith("encoder.layer[0].attn.self.")]
    calls = {s.path.rpartition(".")[2]: s.calls for s in sites if "w" in s.states}
    assert calls == {"q": 1, "k": 2, "v": 1, "o": 1, "scale": 2}
    assert len({s.path for s in sites}) == len(sites)
    text = "peft 1\nedit h at layer[*].attn.k { h += lora(x, r=1) }\nedit w at layer[*].attn.k { w += lowrank(r=1) }"
    one, other = peftc.plan(text, model, sample=sample).edits
    assert (one.foldable, other.foldable) == (True, True)
