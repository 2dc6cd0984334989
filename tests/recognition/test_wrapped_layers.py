"""Wrapped, patched or subclassed layers: `layer[*]` selects all of them, in order."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import peftc
from peftc import PeftcError
from tests import zoo
from tests.laws.harness import close

SPEC = """peft 1
edit q at layer[*].attn.q { h += lora(x, r=2) }
edit f at layer[*].ffn { h += adapter(x, r=3) }
edit l at layer[*] { h += adapter(h, r=3) }
edit p at layer[*].attn { kv = concat(prefix(len=2), kv) }
"""
LAYERS = 4


class AnyArguments(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class Box(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def patch(layer: Any) -> Any:
    cls = type(layer)
    layer.forward = types.MethodType(lambda self, *args, **kwargs: cls.forward(self, *args, **kwargs), layer)
    return layer


def derive(layer: Any) -> Any:
    layer.__class__ = AnyArguments
    return layer


def build() -> Any:
    return zoo.build("llama", torch.float64, num_hidden_layers=LAYERS).eval()


@pytest.mark.parametrize("which", [(1,), (1, 3), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("change", [checkpoint_wrapper, Box, patch, derive])
def test_the_model_is_edited_as_without_wrappers(change: Callable[[Any], Any], which: tuple[int, ...]) -> None:
    plain, model = build(), build()
    for i in which:
        model.model.layers[i] = change(model.model.layers[i])
    peftc.compile(SPEC, plain, seed=0)
    peftc.compile(SPEC, model, seed=0)
    draw = torch.Generator().manual_seed(0)
    own, others = peftc.parameters(model), peftc.parameters(plain)
    assert own.keys() == others.keys()
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.normal_(std=0.3, generator=draw)
            own[name].copy_(parameter)
    inputs = zoo.inputs("llama", plain)
    close(model(**inputs).logits, plain(**inputs).logits)
    report = peftc.verify(model)
    assert report.ok, str(report)
    assert report.witnessed == report.sites


class Product(LlamaDecoderLayer):
    """Its output is no sum with its input."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return hidden_states * self.mlp(self.input_layernorm(hidden_states))


def test_a_layer_without_sub_layers_is_not_skipped_silently() -> None:
    model = build()
    model.model.layers[2].__class__ = Product
    with pytest.raises(PeftcError, match=r"P214[^`]*`layer\[\*\]\.attn\.q`"):
        peftc.plan(SPEC, model)
    assert [part.module for part in peftc.sites(model).untraced] == ["model.layers.2"]


class Classifier(nn.Module):
    """A user's module around a model of transformers, like most classifiers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.backbone = build().model
        self.head = nn.Linear(self.backbone.embed_tokens.embedding_dim, 3).double()
        if config is not Ellipsis:
            self.config = config

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids).last_hidden_state)


@pytest.mark.parametrize("config", [..., None, {}, [1], 3, "text"], ids=str)
def test_a_module_around_a_model_needs_no_configuration(config: Any) -> None:
    ids = torch.arange(1, 7).reshape(1, 6)
    model = peftc.compile(SPEC, Classifier(config).eval(), seed=0, sample={"input_ids": ids})
    assert [edit.name for edit in peftc.plan(SPEC, Classifier(config), sample={"input_ids": ids}).edits] == list("qflp")
    assert len({name.split("/")[1] for name in peftc.parameters(model)}) == 4 * LAYERS
    report = peftc.verify(model, {"input_ids": ids})
    assert report.ok, str(report)
