"""Two specs on one model, compiled one after the other, and the equivalent single spec."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from tests import zoo
from tests.laws.harness import Before, randomise
from tests.laws.recipes import NAMED

NORMS = "train e = [w, b] at layer[*].norm"


@dataclass(frozen=True)
class Pair:
    """`first` and `second` are names of recipes, or texts. `commute`: they do not change the same
    state at one site.
    """

    name: str
    first: str
    second: str
    commute: bool = True

    @property
    def texts(self) -> tuple[str, str]:
        return tuple("peft 1\n" + statements(text) for text in (self.first, self.second))  # type: ignore[return-value]

    @property
    def joint(self) -> str:
        """Both in one text; the edits of the second are called `b.…`, like edits of a recipe."""
        return f"{self.texts[0]}\nmethod second() {{\n{statements(self.second)}\n}}\napply second() as b\n"


def statements(text: str) -> str:
    return NAMED[text].spec if text in NAMED else text


PAIRS = (
    Pair("lora+par-bn", "lora", "par-bn"),
    Pair("lora+lora", "lora", "lora", commute=False),
    Pair("prefix-mlp+multi-head", "prefix-mlp", "multi-head"),
    Pair("dora+ia3", "edit e at layer[*].attn.q { w = magnitude(w + lowrank(r=4, alpha=8)) }", "ia3"),
    Pair("houlsby+norms", "houlsby", NORMS),
    Pair("gated+everything", "gated", "everything", commute=False),
    Pair("norms+scaled-states", NORMS, "scaled-states"),
    Pair("biases+lora", "train e = [b] at layer[*].attn.q | layer[*].attn.v", "lora"),  # of the modules with edits
)
NAMES = ("bart", "bert", "t5", "gpt2", "llama", "mixtral")
# Every pair, and every model.
CASES = [
    (name, PAIRS[i])
    for name, selection in (
        *(("bart", (4,)), ("bert", (2, 7)), ("t5", (3,))),
        *(("gpt2", (5,)), ("llama", (0, 6)), ("mixtral", (1,))),
    )
    for i in selection
]


def fresh(name: str) -> nn.Module:
    return zoo.build(name, torch.float64)


@torch.no_grad()
def logits(name: str, model: nn.Module) -> Tensor:
    return model(**zoo.inputs(name, model))[0]


def compiled(name: str, pair: Pair) -> nn.Module:
    """A new model with both at their initial values: `a`, and `b` with the prefix `b.`."""
    model = peftc.compile(pair.texts[0], fresh(name), seed=0, name="a")
    return peftc.compile(pair.texts[1], model, seed=0, prefix="b")


@cache
def _trained(name: str, pair: Pair) -> tuple[nn.Module, Before]:
    before = Before.of(fresh(name))
    model = compiled(name, pair)
    randomise(peftc.parameters(model))
    return model, before


def trained(name: str, pair: Pair) -> tuple[nn.Module, Before]:
    """A model with both and perturbed parameters, and its base."""
    model, before = _trained(name, pair)
    return copy.deepcopy(model), before


def alone(name: str, text: str, model: nn.Module, spec: str, prefix: str | None = None) -> nn.Module:
    """A model with one of the two, with the parameters of `model`."""
    alone_model = peftc.compile(text, fresh(name), seed=0, name=spec, prefix=prefix)
    values = peftc.parameters(model, spec)
    with torch.no_grad():
        for key, parameter in peftc.parameters(alone_model).items():
            parameter.copy_(values[key])
    return alone_model


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that an error must leave unchanged, by identity where that matters."""
    return {
        "modules": {n: (id(m), type(m)) for n, m in model.named_modules()},
        "parameters": {n: (id(p), p.requires_grad, p.detach().clone()) for n, p in model.named_parameters()},
        "specs": peftc.specs(model),
        "record": id(vars(model)["_peftc"]),
    }


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Asserts that the block leaves the model unchanged."""
    before = snapshot(model)
    yield
    after = snapshot(model)
    for key in ("modules", "specs", "record"):
        assert after[key] == before[key], key
    assert list(after["parameters"]) == list(before["parameters"])
    for name, (at, flag, value) in before["parameters"].items():
        now = after["parameters"][name]
        assert now[:2] == (at, flag), name
        assert torch.equal(now[2], value), name
