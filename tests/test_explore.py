"""`peftc.trace` and `peftc.rewrite`: layers as graphs, for passes written by users."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.utils.matcher_utils import SubgraphMatcher

import peftc
from benchmarks.families import build
from peftc.cli.main import main
from tests import zoo

SPEC = "peft 1\nedit e at layer[*].ffn { h += 4 * adapter(x, r=4, act=relu) }\n"


def test_regions_have_their_states() -> None:
    regions = peftc.trace(zoo.build("bart"))
    assert [len(r.layers) for r in regions] == [2, 3]
    decoder = regions[1]
    assert decoder.state("attn.cross.h") is decoder.states["attn.cross.h"]
    assert "decoder.layer[0].ffn.h" in decoder.state("ffn.h").meta["states"]
    assert decoder.state("ffn.x") in decoder.state("ffn.up.h").all_input_nodes
    assert "self.fc1(" in decoder.code


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_queries_keys_and_values_are_arguments_of_the_attention(name: str) -> None:
    """Through transformers' attention interface, and as a call of torch's function, whose arguments
    have another order.
    """
    region = peftc.trace(build("causal-lm", name)[0], "layer[*].attn")[0]
    attention = region.state("self.kv")
    operands = [region.state(f"self.{each}") for each in "qkv"]
    assert len(set(operands)) == 3
    assert all(attention in node.users for node in operands)
    assert all(node.meta["example"].ndim == 4 for node in operands)


def test_a_table_is_printed_as_the_command_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.build("bart").config.save_pretrained(tmp_path)
    assert main(["sites", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "decoder" in printed
    assert str(peftc.sites(str(tmp_path))) == printed


def test_a_selector_narrows_to_its_sites() -> None:
    (region,) = peftc.trace(zoo.build("llama"), "layer[*].ffn")
    assert set(region.states) == {"ffn.h", "ffn.x", "ffn.res", "ffn.z"}
    assert region.state("h") is region.state("ffn.h")
    with pytest.raises(peftc.PeftcError, match="P207"):
        region.state("hh")
    with pytest.raises(peftc.PeftcError, match="P201"):
        peftc.trace(zoo.build("llama"), "layer[*].attn.cross")
    with pytest.raises(peftc.PeftcError, match="P207"):
        peftc.trace(zoo.build("llama"), "layer[*].ffn | layer[*].attn")[0].state("res")


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_rewriting_leaves_the_region_and_adds_the_edit(name: str) -> None:
    region = peftc.trace(zoo.build(name))[0]
    before = region.code
    graph = peftc.rewrite(region, SPEC)
    added = [n for n in graph.nodes if n.op == "get_attr" and str(n.target).startswith("peftc.e.")]
    assert len(added) == 1, "the module of the parameters"
    assert any(
        n.target is torch.nn.functional.linear and added[0] in n.all_input_nodes[1].all_input_nodes for n in graph.nodes
    )
    assert region.code == before
    assert graph is not region.graph
    graph.lint()


def test_rewriting_enters_a_linear_whose_weight_is_edited() -> None:
    region = peftc.trace(zoo.build("llama"))[0]
    graph = peftc.rewrite(region, "peft 1\nedit d at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }\n")
    assert any(n.op == "get_attr" and n.target == "self_attn.q_proj.weight" for n in graph.nodes)


@pytest.mark.ahead_of_time
def test_installed_graphs_are_those_that_run() -> None:
    model = zoo.build("bert")
    with pytest.raises(peftc.PeftcError, match="P410"):
        peftc.graphs(model)
    peftc.compile(SPEC, model, seed=0)
    installed = peftc.graphs(model)
    assert set(installed) == {f"bert.encoder.layer.{i}.output" for i in range(len(model.bert.encoder.layer))}
    for region in installed.values():
        assert region.graphs
        assert "self.peftc.e.ffn.adapter\n" in region.code
        assert any("adapter" in str(n.target) for n in region.graphs[0].nodes)


def test_tracing_a_name_reads_no_weights() -> None:
    region = peftc.trace("gpt2")[0]
    assert len(region.layers) == 12
    assert isinstance(region.state("ffn.h").meta["example"], torch.Tensor)


def called_with(model: torch.nn.Module, path: str, name: str) -> tuple[dict[str, Any], Tensor]:
    """The arguments by name of a layer's first call in a forward, and what it gave."""
    layer = model.get_submodule(path)
    calls: list[tuple[dict[str, Any], Any]] = []

    def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append((dict(bound.arguments), output))

    handle = layer.register_forward_hook(record, with_kwargs=True)
    model(**zoo.inputs(name, model))
    handle.remove()
    arguments, output = calls[0]
    return arguments, output[0] if isinstance(output, tuple) else output


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "bart", "gpt2", "t5", "mixtral", "vit"])
def test_tools_of_torch_fx_work_on_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    region = peftc.trace(model)[0]
    module = region.graph_module(model.get_submodule(region.layers[0]))
    arguments, expected = called_with(model, region.layers[0], name)
    module.graph.lint()
    inputs = [arguments.get(node.target) for node in module.graph.nodes if node.op == "placeholder"]
    for value in (fx.Interpreter(module).run(*inputs), module(*inputs)):
        assert torch.equal(value[0] if isinstance(value, tuple) else value, expected)

    ShapeProp(module).propagate(*inputs)
    ffn = next(node for node in module.graph.nodes if node.name == region.state("ffn.h").name)
    assert ffn.meta["tensor_meta"].shape == expected.shape

    rows: list[list[object]] = []
    table = SimpleNamespace(tabulate=lambda values, headers: rows.extend(values) or "")
    monkeypatch.setitem(sys.modules, "tabulate", table)
    module.graph.print_tabular()
    assert [row[1] for row in rows] == [node.name for node in module.graph.nodes]

    residual = fx.symbolic_trace(lambda x, y: x + y).graph
    sums = [node for match in SubgraphMatcher(residual).match(module.graph) for node in match.anchors]
    assert len(sums) >= 2
