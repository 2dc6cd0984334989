"""Weights that other code reads, too, are not folded into: a fold would change both uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import peftc
from tests import zoo
from tests.laws.harness import randomise


def llama() -> Any:
    return zoo.build("llama", torch.float64, num_hidden_layers=2).eval()


class HeldHead(nn.Module):
    """Reads the weight of a module that it holds in a list: it is no parameter of its own."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = [embed]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed[0].weight)


class ViewHead(nn.Module):
    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.view = embed.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.view)


class NextToAnotherLinear(nn.Module):
    def __init__(self, own: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.own, self.other = own, [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + F.linear(x, self.other[0].weight)


class Around(nn.Module):
    """Multiplies by the weight of the embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.linear(self.inner.model(input_ids).last_hidden_state, self.inner.model.embed_tokens.weight)


def llama_with_held_head() -> Any:
    model = llama()
    model.lm_head = HeldHead(model.model.embed_tokens)
    return model


def view() -> Any:
    model = llama()
    model.lm_head = ViewHead(model.model.embed_tokens)
    return model


def other_layer() -> Any:
    model = llama()
    first, second = model.model.layers
    second.self_attn.o_proj = NextToAnotherLinear(second.self_attn.o_proj, first.self_attn.q_proj)
    return model


def closure() -> Any:
    model = llama()
    embed = model.model.embed_tokens
    model.lm_head.forward = lambda x: F.linear(x, embed.weight)
    return model


CASES = [
    (closure, "embed", "`lm_head` computes with `model.embed_tokens.weight`"),
    (llama_with_held_head, "embed", "`lm_head` computes with `model.embed_tokens.weight`"),
    (view, "embed", "`lm_head` holds a view of `model.embed_tokens.weight`"),
    (Around, '"inner.model.embed_tokens"', "the model's own code computes with `inner.model.embed_tokens.weight`"),
    (other_layer, "layer[0].attn.q", "`model.layers.1.self_attn.o_proj` computes with"),
]


@pytest.mark.parametrize(("build", "site", "reason"), CASES)
def test_weights_read_by_other_code_are_not_folded_into(build: Callable[[], Any], site: str, reason: str) -> None:
    ids = torch.arange(1, 9).reshape(2, 4)
    model = build().eval()
    spec = f"peft 1\nedit e at {site} {{ w += lowrank(r=2) }}\nedit f at layer[1].attn.v {{ h += lora(x, r=2) }}\n"
    peftc.compile(spec, model, seed=0, sample={"input_ids": ids})
    randomise(peftc.parameters(model))
    want = model(ids)
    report = peftc.fold(model)
    assert [one.edit for one in report.folded] == ["f"]
    assert [one.edit for one in report.refused] == ["e"]
    assert reason in report.refused[0].reason
    got = model(ids)
    torch.testing.assert_close(*(x if isinstance(x, Tensor) else x.logits for x in (got, want)))


def test_reading_the_dtype_of_a_weight_is_no_use_of_it() -> None:
    class ReadsTheWeightsType(HeldHead):
        def __init__(self, embed: nn.Module, head: nn.Module) -> None:
            super().__init__(embed)
            self.head = head

        def forward(self, x: Tensor) -> Tensor:
            weight = self.embed[0].weight
            return self.head(x.to(weight.dtype).type_as(weight) + torch.zeros_like(weight).sum() + weight.shape[0] * 0)

    model = llama()
    model.lm_head = ReadsTheWeightsType(model.model.embed_tokens, model.lm_head)
    peftc.compile("peft 1\nedit e at embed { w += lowrank(r=2) }\n", model, seed=0)
    randomise(peftc.parameters(model))
    assert [one.edit for one in peftc.fold(model).folded] == ["e"]


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        model = llama()
    peftc.compile("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }\n", model, seed=0)
    randomise(peftc.parameters(model))
    (refusal,) = peftc.fold(model).refused
    assert "torch.inference_mode()" in refusal.reason
    with torch.inference_mode():
        assert [one.edit for one in peftc.fold(model).folded] == ["e"]
