"""A forward that a program assigns to a compiled model has to call its edited head."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo

HEAD = "peft 2\nedit own at head { h += lora(x, r=2) }\nedit q at layer[*].attn.q { h += lora(x, r=2) }"
WEIGHT = HEAD.replace("h += lora(x, r=2) }\nedit q", "w += lowrank(r=2) }\nedit q")


def fuse(model: Any) -> None:
    """A forward that multiplies by the weight of the head, as TRL's does."""
    original = model.forward

    def forward(self: Any, *args: Any, fused: bool = False, **inputs: Any) -> Any:
        if not fused:
            return original(*args, **inputs)
        return nn.functional.linear(self.base_model(**inputs)[0], self.get_output_embeddings().weight)

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("spec", [HEAD, WEIGHT], ids=["h", "w"])
def test_an_edit_of_the_head_is_not_lost(spec: str) -> None:
    base: Any = zoo.build("llama")
    inputs = zoo.inputs("llama", base)
    expected: Tensor = base(**inputs).logits
    model: Any = peftc.compile(spec, base, seed=0)
    fuse(model)
    assert torch.equal(model(**inputs).logits, expected)
    assert model.generate(inputs["input_ids"], max_new_tokens=2).shape[1] == inputs["input_ids"].shape[1] + 2
    with pytest.raises(PeftcError, match="P435") as refused:
        model(**inputs, fused=True)
    assert "`own` edits the head" in str(refused.value)
    assert not model.get_output_embeddings()._forward_pre_hooks
    with peftc.disabled(model):
        assert torch.allclose(model(**inputs, fused=True), expected, atol=1e-5)
    reference, own = peftc.reference(model), peftc.reference(model, "default")
    for view in (reference, own):
        fuse(view)
    assert torch.allclose(reference(**inputs, fused=True), expected, atol=1e-5)
    assert torch.equal(own(**inputs).logits, expected)
    with pytest.raises(PeftcError, match="P435"):
        own(**inputs, fused=True)


def test_a_trained_head_is_read() -> None:
    model: Any = peftc.compile('peft 2\ntrain own = [w] at "lm_head"', zoo.build("llama"), seed=0)
    inputs = zoo.inputs("llama", model)
    fuse(model)
    model(**inputs, fused=True).sum().backward()
    assert all(p.grad is not None for p in peftc.parameters(model).values())
