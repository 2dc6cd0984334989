"""Edits inside `torch.no_grad()` blocks of the model are refused; edits outside are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests import zoo

EDIT = "peft 1\nedit e at layer[*].%s { h += adapter(x, r=2, act=relu) }"
Block = Callable[[], AbstractContextManager[Any]]


def frozen(block: Block) -> Any:
    """A model that runs its feed-forward sub-layers inside such a block."""
    model = zoo.build("llama")

    class Frozen(type(model.model.layers[0].mlp)):
        def forward(self, x: Tensor) -> Tensor:
            with block():
                return super().forward(x)

    for layer in model.model.layers:
        layer.mlp.__class__ = Frozen
    return model


@pytest.mark.parametrize("block", [torch.no_grad, lambda: torch.set_grad_enabled(False)])
@pytest.mark.parametrize("site", ["ffn.up", "ffn.down", "ffn.hidden", "ffn"])
def test_an_edit_that_would_not_learn_is_refused(block: Block, site: str) -> None:
    model = frozen(block)
    before = {n: type(m) for n, m in model.named_modules()}
    with pytest.raises(peftc.PeftcError, match="P416"):
        peftc.compile(EDIT % site, model)
    assert {n: type(m) for n, m in model.named_modules()} == before


def test_a_weight_that_is_used_without_gradients_is_refused() -> None:
    text = "peft 1\nedit e at layer[*].%s { w += lowrank(r=2) }"
    with pytest.raises(peftc.PeftcError, match="P416"):
        peftc.compile(text % "ffn.up", frozen(torch.no_grad))
    assert learns(peftc.compile(text % "attn.q", frozen(torch.no_grad), seed=0))


@pytest.mark.parametrize("site", ["attn", "attn.q"])
def test_edits_outside_the_block_learn(site: str) -> None:
    assert learns(peftc.compile(EDIT % site, frozen(torch.no_grad), seed=0))


@pytest.mark.parametrize("block", [nullcontext, torch.enable_grad, lambda: torch.set_grad_enabled(True)])
def test_edits_in_an_enable_grad_block_learn(block: Block) -> None:
    assert learns(peftc.compile(EDIT % "ffn.up", frozen(block), seed=0))


def learns(model: nn.Module) -> bool:
    for parameter in peftc.parameters(model).values():
        nn.init.normal_(parameter)
    model(**zoo.inputs("llama", model, labels=True)).loss.backward()
    return all(p.grad is not None and bool(p.grad.any()) for p in peftc.parameters(model).values())
