"""Gradient checkpointing: layers run twice, and gradients are the same; dropout draws the same numbers both times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import randomise
from tests.survival.harness import SOME, SPECIES, all_close, compiled, given, gradients, layers, text

pairs = pytest.mark.parametrize(("name", "spec"), SOME)


def switch_on(model: Any, reentrant: bool = False) -> None:
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the older name
    enable({"use_reentrant": reentrant})


def backward(model: nn.Module, inputs: dict[str, Any], seed: int = 5) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(**inputs).loss.backward()
    return gradients(model)


def runs(model: nn.Module) -> dict[str, int]:
    """How often an edited layer's own modules run from here on: one count a layer."""
    counts: dict[str, int] = {}
    for name, layer in layers(model):
        counts[name] = 0

        def count(*_: Any, name: str = name) -> None:
            counts[name] += 1

        next(m for m in layer.modules() if isinstance(m, nn.Linear)).register_forward_pre_hook(count)
    assert counts
    return counts


@pairs
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
def test_gradients_are_those_without(name: str, spec: str, reentrant: bool) -> None:
    model = compiled(name, spec, dropout=0.2).train()
    inputs = given(name, model)
    want = backward(model, inputs)
    assert want
    switch_on(model, reentrant)
    if reentrant and name != "vit":
        model.enable_input_require_grads()
    elif reentrant:
        inputs["pixel_values"].requires_grad_(True)
    counts = runs(model)
    assert set(counts.values()) == {0}
    got = backward(model, inputs)
    assert set(counts.values()) == {2}, f"layers were not run again: {counts}"
    all_close(got, want, 1e-12)
    different = backward(model, inputs, seed=6)
    assert any(not torch.equal(different[k], want[k]) for k in want), "dropout does nothing"
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    counts.update(dict.fromkeys(counts, 0))
    all_close(backward(model, inputs), want, 1e-12)
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("name", SPECIES)
def test_enabled_before_compiling(name: str) -> None:
    """The flag is the model's; what is compiled afterwards obeys it."""
    model = zoo.build(name, torch.float64).train()
    switch_on(model)
    peftc.compile(text("sequential"), model, seed=0)
    randomise(peftc.parameters(model))
    inputs = given(name, model)
    counts = runs(model)
    got = backward(model, inputs)
    assert set(counts.values()) == {2}
    all_close(got, backward(compiled(name, "sequential").train(), inputs), 1e-12)


@pytest.mark.parametrize("name", SPECIES)
def test_nothing_runs_again_in_evaluation(name: str) -> None:
    model = compiled(name, "mam")
    inputs = given(name, model)
    want = model(**inputs).loss
    switch_on(model)
    counts = runs(model)
    loss = model(**inputs).loss
    loss.backward()
    assert torch.equal(loss, want)
    assert set(counts.values()) == {1}
