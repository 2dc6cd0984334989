"""Gradient checkpointing: layers are recomputed, gradients are the same, and dropout draws the same
masks both times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import peftc
from tests import zoo
from tests.laws.harness import randomise
from tests.layers import Layers
from tests.survival.harness import SOME, SPECIES, all_close, compiled, gradients, layers, model_inputs, text

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
    """Counts the calls of an edited layer's own modules."""
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
    inputs = model_inputs(name, model)
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
    """The flag belongs to the model; modules compiled later follow it."""
    model = zoo.build(name, torch.float64).train()
    switch_on(model)
    peftc.compile(text("sequential"), model, seed=0)
    randomise(peftc.parameters(model))
    inputs = model_inputs(name, model)
    counts = runs(model)
    got = backward(model, inputs)
    assert set(counts.values()) == {2}
    all_close(got, backward(compiled(name, "sequential").train(), inputs), 1e-12)


@pytest.mark.parametrize("name", SPECIES)
def test_evaluation_recomputes_nothing(name: str) -> None:
    model = compiled(name, "mam")
    inputs = model_inputs(name, model)
    want = model(**inputs).loss
    switch_on(model)
    counts = runs(model)
    loss = model(**inputs).loss
    loss.backward()
    assert torch.equal(loss, want)
    assert set(counts.values()) == {1}


# Checkpoints inside a layer
# ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A layer that checkpoints its first Linear if `predicate` says so."""

    def __init__(self, predicate: Callable[[], bool], options: dict[str, Any]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.predicate, self.options = predicate, options

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x)
        z = checkpoint(self.up, z, **self.options) if self.predicate() else self.up(z)
        return x + self.down(torch.relu(z))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("edited", ['"layers.*.up" { h += lora(x, r=2) }', "layer[*].ffn { h += adapter(h, r=2) }"])
@pytest.mark.parametrize("predicate", [torch.is_grad_enabled, lambda: True], ids=["with-gradients", "always"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_the_code_of_a_layer(reentrant: bool, predicate: Callable[[], bool], edited: str) -> None:
    """The trace includes the checkpoint: outputs and gradients equal those without one."""

    def compiled(ask: Callable[[], bool]) -> nn.Module:
        torch.manual_seed(0)
        stack = Layers(*(Layer(ask, {"use_reentrant": reentrant}) for _ in range(2))).double()
        peftc.compile(f"peft 1\nedit e at {edited}\n", stack, seed=0, sample={"x": x})
        with torch.no_grad():
            for value in peftc.parameters(stack).values():
                value.normal_(generator=torch.Generator().manual_seed(1))
        return stack

    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results: list[list[Tensor]] = []
    for ask in (predicate, lambda: False):
        model = compiled(ask)
        out = model(x)
        out.square().sum().backward()
        with torch.no_grad():
            results.append([out, model(x), *(p.grad for p in peftc.parameters(model).values() if p.grad is not None)])
        assert len(results[-1]) == 2 + len(peftc.parameters(model))
        with peftc.disabled(model), torch.no_grad():
            assert not torch.allclose(model(x), out)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
