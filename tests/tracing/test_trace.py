"""Tracing is lossless: a model whose layers run from their traces computes the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from peftc.dataflow.layer_graph import LayerGraph
from peftc.recognition.analysis import analyse
from peftc.recognition.roles import sub_layers
from peftc.specialization.generated_class import GeneratedClass
from peftc.tracing.module_calls import bind_arguments
from peftc.tracing.tracer import RegionTracer
from tests import zoo
from tests.matrix import checkerboard


def retraced(
    name: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, nn.Module, list[GeneratedClass]]:
    """A model, and one whose layers run from their traces, with all code inlined and no edits."""
    base, model = zoo.build(name, dtype, **options), zoo.build(name, dtype, **options)
    kinds: dict[type, GeneratedClass] = {}
    for stack in analyse(model).structure.stacks:
        for layer in map(model.get_submodule, stack.layers):
            inner = {n for n, m in layer.named_modules() if next(m.children(), None) is not None} | {""}
            kind = kinds.setdefault(
                type(layer), GeneratedClass(type(layer), frozenset(inner), (), type(layer).__name__)
            )
            layer.__class__ = kind.cls
    return base, model, list(kinds.values())


@pytest.mark.parametrize(("name", "padding"), checkerboard(zoo.ALL, (None, "right")))
def test_a_traced_layer_computes_the_same(name: str, padding: Any) -> None:
    base, model, kinds = retraced(name)
    inputs = zoo.inputs(name, base, padding=padding)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], base(**inputs)[0])
    assert all(kind.variants for kind in kinds)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_dropout_draws_the_same_numbers(name: str) -> None:
    base, model, _ = retraced(name, dropout=0.2)
    inputs = zoo.inputs(name, base)
    out: list[torch.Tensor] = []
    for m in (base, model):
        m.train()
        m(**inputs)  # the first call traces
        torch.manual_seed(3)
        out.append(m(**inputs)[0])
    assert torch.equal(*out)
    assert not torch.equal(out[0], base.eval()(**inputs)[0])


@pytest.mark.parametrize("name", zoo.GENERATING)
def test_caches_are_used_and_not_mixed_up(name: str) -> None:
    base, model, _ = retraced(name)
    inputs = {k: v for k, v in zoo.inputs(name, base).items() if k in ("input_ids", "attention_mask")}
    for options in ({"num_beams": 1}, {"num_beams": 3}, {"num_beams": 1, "cache_implementation": "static"}):
        generations = [m.generate(**inputs, do_sample=False, max_new_tokens=6, **options) for m in (base, model)]
        assert torch.equal(*generations), options


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_half_precision_takes_its_own_branches(name: str, dtype: torch.dtype) -> None:
    base, model, _ = retraced(name, dtype)
    inputs = zoo.inputs(name, base)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], base(**inputs)[0])


def test_both_sides_of_a_branch_on_values() -> None:
    """BART clamps a layer's output in float16 if it is not finite, which is known only
    at run time.
    """
    base, model, kinds = retraced("bart", torch.float16)
    encoder = next(k for k in kinds if "Encoder" in k.name)
    inputs = zoo.inputs("bart", base)
    with torch.no_grad():
        model(**inputs)
        assert "clamp" in encoder.source
        assert len(encoder.variants) == 1
        for m in (base, model):
            m.model.encoder.layers[0].final_layer_norm.bias[0] = float("inf")
        want, got = base.model.encoder(inputs["input_ids"])[0], model.model.encoder(inputs["input_ids"])[0]
    assert torch.equal(want.nan_to_num(), got.nan_to_num())
    assert len(encoder.variants) == 1


def test_tracing_leaves_everything_as_it_was() -> None:
    model = zoo.build("bart")
    layer = model.model.decoder.layers[0]
    classes = [type(m) for m in model.modules()]
    zeros, call = torch.zeros, nn.Module.__call__
    hidden = torch.randn(2, 3, model.config.d_model)
    arguments = bind_arguments(type(layer).forward, layer, (hidden,), {})
    traced = RegionTracer(lambda name: name == "self_attn").trace_region(layer, arguments)
    assert any(n.target == "fc1" for n in traced.graph.nodes)
    assert [type(m) for m in model.modules()] == classes
    assert torch.zeros is zeros
    assert nn.Module.__call__ is call


class Named(nn.Module):
    """An attention with q, k and v as keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(_attn_implementation="sdpa")
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attend = AttentionInterface().get_interface(self.config._attn_implementation, None)  # pyright: ignore
        mixed, _ = attend(self, value=v, query=q, key=k, attention_mask=None)
        return x + self.o(mixed.flatten(2))


def test_an_attention_with_keyword_arguments() -> None:
    root = Named()
    graph = RegionTracer(lambda _: False).trace_region(root, {"x": torch.randn(2, 5, 8)}).graph
    (attn,) = sub_layers(LayerGraph(graph, root))
    assert {role: str(p.node.target) for role, p in attn.projections.items()} == {role: role for role in "qkvo"}
