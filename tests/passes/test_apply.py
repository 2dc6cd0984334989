"""`peftc.apply`: what a pass may do, how it composes with specs, and what is refused."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher
from torch.nn import functional as F

import peftc
from peftc.installation.record import installation_of
from tests import zoo
from tests.refusals import refused

FFN = "layer[*].ffn"
LORA = "peft 1\nedit late at layer[*].attn.q { h += lora(x, r=2) }\n"


def steer(region: Any) -> None:
    v = region.parameter("v", (region.width("ffn.h"),), ("normal", 0.5))
    region.replace("ffn.h", region.call(torch.add, region["ffn.h"], v))


def double_queries(region: Any) -> None:
    region.replace("attn.self.q.h", region.call(operator.mul, region["attn.self.q.h"], 2))


class Statistics(nn.Module):
    total: torch.Tensor
    count: torch.Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(d))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, h: torch.Tensor) -> None:
        self.total += h.detach().sum((0, 1))
        self.count += h.shape[0] * h.shape[1]


def collect(region: Any) -> None:
    statistics = region.module("statistics", lambda: Statistics(region.width("ffn.h")))
    region.call(statistics, region["ffn.h"])


@pytest.mark.parametrize("name", ["llama", "bart", "t5", "gpt2"])
def test_parameters_are_drawn_once_for_each_site_and_act(name: str) -> None:
    model, other = zoo.build(name), zoo.build(name)
    batch = zoo.inputs(name, model)
    with torch.no_grad():
        before = model(**batch).logits
    peftc.apply(steer, model, at=FFN, seed=1)
    values = list(peftc.parameters(model).values())
    assert len(values) == sum(len(region.layers) for region in peftc.trace(other, FFN))
    assert all(not torch.equal(values[0], value) for value in values[1:])
    peftc.apply(steer, other, at=FFN, seed=1)
    assert all(torch.equal(*pair) for pair in zip(values, peftc.parameters(other).values(), strict=True))
    with torch.no_grad():
        assert not torch.allclose(model(**batch).logits, before)
        with peftc.disabled(model, "steer"):
            assert torch.equal(model(**batch).logits, before)
        peftc.remove(model, "steer")
        assert torch.equal(model(**batch).logits, before)


def test_a_module_of_a_pass_sees_each_call() -> None:
    model = zoo.build("llama")
    batch = zoo.inputs("llama", model)
    before = model(**batch).logits
    peftc.apply(collect, model, at=FFN)
    seen: list[torch.Tensor] = []
    hooks = [layer.mlp.register_forward_hook(lambda m, a, out: seen.append(out)) for layer in model.model.layers]
    reference = copy.deepcopy(model)
    peftc.remove(reference)
    with pytest.raises(peftc.PeftcError, match="P426"):  # the code of the layer is entered
        model(**batch)
    assert not seen
    reference(**batch)
    for hook in hooks:
        hook.remove()
    assert torch.equal(model(**batch).logits, before)
    for layer, h in zip(model.model.layers, seen, strict=True):
        statistics = layer.peftc.collect.ffn.collect.statistics
        assert int(statistics.count) == h.shape[0] * h.shape[1]
        torch.testing.assert_close(statistics.total, h.sum((0, 1)))


def test_a_pass_that_reads_its_layer_runs_for_each() -> None:
    def scale(region: Any) -> None:
        region.replace("ffn.h", region.call(operator.mul, region["ffn.h"], 0.0 if region.layer == 1 else 1.0))

    model = zoo.build("llama")
    batch = zoo.inputs("llama", model)
    reference = zoo.build("llama")
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight.zero_()
    peftc.apply(scale, model, at=FFN)
    torch.testing.assert_close(model(**batch).logits, reference(**batch).logits)


def test_an_input_is_replaced_for_its_readers_alone() -> None:
    """The norm's output in BART is the residual stream, too."""

    def zero(region: Any) -> None:
        region.replace("ffn.x", region.call(operator.mul, region["ffn.x"], 0.5))

    model, reference = zoo.build("bart"), zoo.build("bart")
    with torch.no_grad():
        for layer in (*reference.model.encoder.layers, *reference.model.decoder.layers):
            layer.fc1.weight.mul_(0.5)
    peftc.apply(zero, model, at=FFN)
    batch = zoo.inputs("bart", model)
    torch.testing.assert_close(model(**batch).logits, reference(**batch).logits)


def test_specs_and_passes_act_in_order() -> None:
    """2 q + lora after a pass that doubles, 2 (q + lora) before it."""
    first, last = zoo.build("bert"), zoo.build("bert")
    batch = zoo.inputs("bert", first)
    peftc.compile(LORA, first, seed=0)
    peftc.apply(double_queries, first, at="layer[*].attn", name="double")
    peftc.apply(double_queries, last, at="layer[*].attn", name="double")
    peftc.compile(LORA, last, seed=0)
    for model, factor in ((first, 2.0), (last, 1.0)):
        reference: Any = zoo.build("bert")
        with torch.no_grad():
            for name, value in peftc.parameters(model).items():
                value.normal_(generator=torch.Generator().manual_seed(len(name)))
            values = list(peftc.parameters(model).values())
            for layer, a, b in zip(reference.bert.encoder.layer, values[::2], values[1::2], strict=True):
                query = layer.attention.self.query
                query.weight.copy_(2 * query.weight + factor * b @ a)
                query.bias.mul_(2)
        torch.testing.assert_close(model(**batch).logits, reference(**batch).logits, rtol=1e-4, atol=1e-4)
    peftc.remove(last, "double")
    peftc.remove(first, "double")
    torch.testing.assert_close(first(**batch).logits, last(**batch).logits)


def double(region: Any) -> None:
    region.replace("ffn.h", region.call(operator.mul, region["ffn.h"], 2.0))


@pytest.mark.parametrize("name", ["bart", "llama"])
def test_a_pass_reads_what_edits_in_the_code_of_the_layer_have_written(name: str) -> None:
    edit = "peft 2\nedit e at layer[*].ffn { z *= vector(init=3)\nh += lora(z, r=2)REST }"
    one, two = (zoo.build(name, torch.float64) for _ in range(2))
    peftc.compile(edit.replace("REST", ""), one, seed=0)
    peftc.apply(double, one, at=FFN)
    peftc.compile(edit.replace("REST", "\nh *= 2"), two, seed=0)
    for model in (one, two):
        for value in peftc.parameters(model).values():
            value.data += 0.5
    batch = zoo.inputs(name, one)
    torch.testing.assert_close(one(**batch).logits, two(**batch).logits)


def test_an_edit_of_what_a_module_reads_acts_before_a_later_pass() -> None:
    """The pass computes `z` anew, of what the edit has not changed."""

    def anew(region: Any) -> None:
        gate = region.call(torch.relu, region["ffn.gate.h"])
        region.replace("ffn.z", region.call(operator.mul, gate, region["ffn.up.h"]))

    first, last, alone = (zoo.build("llama", torch.float64) for _ in range(3))
    edit = "peft 2\nedit e at layer[*].ffn.hidden { h *= vector(init=3) }"
    peftc.compile(edit, first, seed=0)
    for model in (first, last, alone):
        peftc.apply(anew, model, at=FFN)
    peftc.compile(edit, last, seed=0)
    batch = zoo.inputs("llama", first)
    assert torch.equal(first(**batch).logits, alone(**batch).logits)
    assert not torch.allclose(last(**batch).logits, alone(**batch).logits)


def test_passes_act_in_order() -> None:
    def add(region: Any) -> None:
        region.replace("ffn.h", region.call(operator.add, region["ffn.h"], 1.0))

    def both(region: Any) -> None:
        add(region)
        double(region)

    one, two, other = (zoo.build("gpt2") for _ in range(3))
    batch = zoo.inputs("gpt2", one)
    peftc.apply(both, one, at=FFN)
    peftc.apply(add, two, at=FFN)
    peftc.apply(double, two, at=FFN)
    peftc.apply(double, other, at=FFN)
    peftc.apply(add, other, at=FFN)
    assert torch.equal(one(**batch).logits, two(**batch).logits)
    assert not torch.allclose(one(**batch).logits, other(**batch).logits)


def test_what_a_pass_has_read_stays_when_a_later_edit_replaces_it() -> None:
    model = zoo.build("llama")
    peftc.apply(collect, model, at=FFN)
    reference = copy.deepcopy(model)
    peftc.compile("peft 1\nedit e at layer[1].ffn { h *= vector(init=3) }\n", model)
    batch = zoo.inputs("llama", model)
    for one in (model, reference):
        one(**batch)
    totals = [one.model.layers[1].peftc.collect.ffn.collect.statistics.total for one in (model, reference)]
    assert torch.equal(*totals)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_and_checkpointing(checkpointing: bool) -> None:
    model = zoo.build("llama", torch.float64)
    batch = zoo.inputs("llama", model, labels=True)
    peftc.apply(steer, model, at=FFN, seed=0)
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    model(**batch).logits.square().sum().backward()
    for value in peftc.parameters(model).values():
        assert value.grad is not None
        step = 1e-6 * torch.ones_like(value)
        with torch.no_grad():
            value += step
            above = model(**batch).logits.square().sum()
            value -= 2 * step
            below = model(**batch).logits.square().sum()
            value += step
        torch.testing.assert_close((above - below) / 2e-6, value.grad.sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_pass_is_applied_where_gradients_are_off(mode: Callable[[], Any]) -> None:
    model = zoo.build("bert")
    with mode():
        peftc.apply(double_queries, model, at="layer[*].attn")
    model.train()
    model(**zoo.inputs("bert", model)).logits.sum()


def test_half_precision_and_autocast() -> None:
    model = zoo.build("llama", torch.bfloat16)
    peftc.apply(steer, model, at=FFN)
    batch = zoo.inputs("llama", model)
    assert {p.dtype for p in peftc.parameters(model).values()} == {torch.bfloat16}
    assert model(**batch).logits.dtype == torch.bfloat16
    model = zoo.build("llama")
    peftc.apply(steer, model, at=FFN)
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch).logits.sum().backward()


def test_save_and_load(tmp_path: Path) -> None:
    model, other = zoo.build("llama"), zoo.build("llama")
    batch = zoo.inputs("llama", model)
    peftc.compile(LORA, model, seed=0)
    peftc.apply(steer, model, at=FFN)
    peftc.apply(collect, model, at=FFN)
    model(**batch)
    peftc.save(model, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter.json").read_text())["passes"] == ["steer", "collect"]
    diagnostic = refused("P447", lambda: peftc.load(tmp_path / "adapter", other, passes={"steer": steer}), other)
    assert "collect" in diagnostic.message
    refused("P447", lambda: peftc.load(tmp_path / "adapter", other), other)
    peftc.load(tmp_path / "adapter", other, passes={"steer": steer, "collect": collect})
    counts = [m.model.layers[0].peftc.collect.ffn.collect.statistics.count for m in (model, other)]
    assert int(counts[0]) == int(counts[1]) > 0
    assert torch.equal(other(**batch).logits, model(**batch).logits)
    peftc.remove(other)
    steer_other: Callable[[Any], None] = lambda region: region.parameter("w", (3,))  # noqa: E731
    refused(
        "P443",
        lambda: peftc.load(tmp_path / "adapter", other, passes={"steer": steer_other, "collect": collect}),
        other,
    )
    peftc.save(model, tmp_path / "one", "steer")
    peftc.load(tmp_path / "one", other, passes={"steer": steer})
    assert [n.partition("/")[0] for n in peftc.parameters(other)] == ["steer"] * len(other.model.layers)


def test_plans_count_what_passes_have() -> None:
    model = zoo.build("llama")
    peftc.apply(steer, model, at=FFN)
    (entry,) = installation_of(model).planned.plan.edits
    assert entry.trained == entry.stored == sum(p.numel() for p in peftc.parameters(model).values())
    assert not entry.foldable
    assert "`steer` is a pass" in entry.reason


@torch.no_grad()
@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_tensor_gives_sizes_and_values(kind: str, tmp_path: Path) -> None:
    base = zoo.build("llama", torch.float64)
    v = torch.randn(base.config.hidden_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def add(region: Any) -> None:
        region.replace("ffn.h", region.call(torch.add, region["ffn.h"], getattr(region, kind)("v", v)))

    model = peftc.apply(add, zoo.build("llama", torch.float64), at=FFN)
    for layer in base.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: output + v)
    batch = zoo.inputs("llama", model)
    assert torch.equal(model(**batch).logits, base(**batch).logits)
    assert len(peftc.parameters(model)) == (len(base.model.layers) if kind == "parameter" else 0)
    peftc.save(model, tmp_path)
    again = peftc.load(tmp_path, zoo.build("llama", torch.float64), passes={"add": add})
    assert torch.equal(again(**batch).logits, base(**batch).logits)


def test_tools_of_fx_work() -> None:
    shapes: list[tuple[int, ...]] = []
    matches: list[int] = []

    def gated(gate: Any, up: Any) -> Any:
        return gate * up

    def inspect(region: Any) -> None:
        region.graph.lint()
        if find_spec("tabulate"):
            region.graph.print_tabular()
        pattern = fx.symbolic_trace(gated).graph
        matches.append(len(SubgraphMatcher(pattern).match(region.graph)))
        part = fx.Graph()
        x = part.placeholder("x")
        part.output(part.call_function(F.gelu, (x,)))
        module = fx.GraphModule(nn.Module(), part)
        ShapeProp(module).propagate(torch.zeros(region["ffn.z"].meta["example"].shape))
        shapes.append(next(iter(reversed(part.nodes))).meta["tensor_meta"].shape)
        region.call(F.gelu, region["ffn.z"])

    model = zoo.build("llama")
    peftc.apply(inspect, model, at=FFN)
    assert matches[0] >= 1
    assert shapes[0][-1] == model.config.intermediate_size


# Refusals -----------------------------------------------------------------------------------------


def two_nodes_in_the_wrong_order(region: Any) -> None:
    first = next(iter(region.graph.nodes))
    with region.graph.inserting_after(first):
        node = region.graph.call_function(torch.relu, (region["ffn.h"],))
    region.graph.call_function(torch.relu, (node,))


def wrong_shape(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.mean, region["ffn.h"], -1))


def wrong_dtype(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.gt, region["ffn.h"], 0))


def no_operands(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.matmul, region["ffn.h"], region["ffn.h"]))


def detaching(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.detach, region["ffn.h"]))


def unused_parameter(region: Any) -> None:
    region.parameter("v", (4,))


def tensor_operand(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.add, region["ffn.h"], torch.ones(1)))


def failing(region: Any) -> None:
    raise KeyError(region.site)


def in_place(region: Any) -> None:
    region.replace("ffn.h", region.call(torch.relu_, region["ffn.h"]))


RUNS = {"number": 0}


def other_shape_each_time(region: Any) -> None:
    RUNS["number"] += 1
    h = region["ffn.h"]
    v = region.parameter("v", (1,) * (1 + RUNS["number"] % 2))
    region.replace("ffn.h", region.call(torch.add, h, v))


def unknown_state(region: Any) -> None:
    region["ffn.hh"]


def negative_size(region: Any) -> None:
    region.buffer("v", (-1, 4))


def values_of_another_shape(region: Any) -> None:
    region.parameter("v", (region.width("ffn.h"),), torch.ones(1))


REFUSALS = [
    ("P440", negative_size, "sizes"),
    ("P440", values_of_another_shape, "first values"),
    ("P441", two_nodes_in_the_wrong_order, "relu"),
    ("P442", wrong_shape, "mean"),
    ("P442", wrong_dtype, "gt"),
    ("P441", no_operands, "matmul"),
    ("P443", detaching, "detach"),
    ("P443", unused_parameter, "`v`"),
    ("P441", tensor_operand, "Tensor"),
    ("P440", failing, "failing"),
    ("P441", in_place, "relu_"),
    ("P444", other_shape_each_time, "members"),
    ("P207", unknown_state, "ffn.hh"),
]


@pytest.mark.parametrize(("code", "function", "word"), REFUSALS, ids=[f.__name__ for _, f, _ in REFUSALS])
def test_refusals_name_the_node(code: str, function: Callable[[Any], None], word: str) -> None:
    model = zoo.build("llama")
    diagnostic = refused(code, lambda: peftc.apply(function, model, at=FFN), model)
    assert word in diagnostic.message


def test_refusals_of_places_and_names() -> None:
    model = zoo.build("llama")
    refused("P440", lambda: peftc.apply("steer", model, at=FFN, name="s"), model)  # pyright: ignore[reportArgumentType]
    refused("P440", lambda: peftc.apply(lambda region: None, model, at=FFN), model)
    refused("P201", lambda: peftc.apply(steer, model, at="layer[*].attn.cross"), model)
    refused("P445", lambda: peftc.apply(steer, model, at="decoder.embed"), model)
    refused("P560", lambda: peftc.apply(steer, model, at=FFN, seed=2**70), model)
    peftc.apply(steer, model, at=FFN)
    refused("P412", lambda: peftc.apply(steer, model, at=FFN), model)
    refused("P412", lambda: peftc.compile("peft 1\nedit steer at layer[*].ffn { h *= vector() }\n", model), model)


def test_what_needs_equations_is_refused(tmp_path: Path) -> None:
    model = zoo.build("llama")
    peftc.compile(LORA, model)
    peftc.apply(steer, model, at=FFN)
    for function in (
        lambda: peftc.fold(model),
        lambda: peftc.verify(model),
        lambda: peftc.export(model, tmp_path / "peft"),
        lambda: peftc.save_standalone(model, tmp_path / "whole"),
    ):
        assert "`steer`" in refused("P446", function, model).message
