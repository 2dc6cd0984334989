"""A model with two specs and tasks, and the choices of `peftc.task` and `peftc.disabled` on it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

import peftc
from tests import zoo
from tests.laws.harness import randomise

SPEC = """peft 1
edit each at layer[*].ffn per task { h += adapter(x, r=4, act=relu) }
edit side at layer[*].attn.q { h += lora(x, r=2) }
train norms = [w] at layer[*].norm
"""
SECOND = "peft 1\nedit late at layer[*].attn.v { h += lora(x, r=2) }"
IDS = torch.arange(12).reshape(2, 6)


@cache
def pristine() -> Any:
    model = peftc.compile(SPEC, zoo.build("llama", torch.float64), seed=0, name="first", tasks=["a", "b"])
    peftc.compile(SECOND, model, seed=0, name="second")
    randomise(peftc.parameters(model))
    return model


def compiled() -> Any:
    return copy.deepcopy(pristine())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


@cache
def expected() -> dict[str, Tensor]:
    """The outputs of each choice; all differ."""
    model = compiled()
    outputs = {"base": logits(zoo.build("llama", torch.float64))}
    for name, choice in CHOICES.items():
        with choice(model):
            outputs.setdefault(name, logits(model))
            assert torch.equal(logits(model), outputs[name])
    assert all(not torch.equal(outputs[a], outputs[b]) for a in outputs for b in outputs if a != b)
    return outputs


@contextmanager
def both(model: Any) -> Iterator[Any]:
    with peftc.task(model, "a"), peftc.disabled(model, "second"):
        yield model


CHOICES: dict[str, Callable[[Any], Any]] = {
    "a": lambda m: peftc.task(m, "a"),
    "b": lambda m: peftc.task(m, "b"),
    "rows": lambda m: peftc.task(m, task_ids=["b", "a"]),
    "base": peftc.disabled,
    "in part": both,
    "second alone": lambda m: peftc.disabled(m, "first"),
}


def check(model: Any, name: str) -> None:
    assert torch.equal(logits(model), expected()[name]), name
