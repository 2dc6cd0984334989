"""Inferred roles against hand-written tables."""

from __future__ import annotations

import pytest
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS

import peftc
from peftc.addressing.sites import Site, SiteTable
from peftc.recognition.analysis import analyse
from tests import zoo

GATED = {"t5-gated", "llama", "qwen2", "qwen3", "mistral"}


@pytest.fixture(scope="module")
def tables() -> dict[str, SiteTable]:
    return {name: peftc.sites(zoo.build(name)) for name in zoo.ALL}


def last(site: Site) -> str:
    return site.steps[-1][0]


def below(table: SiteTable, layer: str) -> set[str]:
    return {s.path.removeprefix(layer + ".") for s in table.sites if s.path.startswith(layer + ".")}


@pytest.mark.parametrize("name", zoo.ALL)
def test_every_layer_has_its_sites(name: str, tables: dict[str, SiteTable]) -> None:
    table = tables[name]
    layers = [s.path for s in table.sites if last(s) == "layer"]
    assert len(layers) == len({s.root for s in table.sites if "layer" in dict(s.steps)})
    for layer in layers:
        sites = below(table, layer)
        assert {f"attn.self.{r}" for r in ("q", "k", "v", "o", "heads", "norm", "add")} <= sites
        assert {f"ffn.{r}" for r in ("up", "down", "hidden", "norm", "add")} <= sites
        assert ("ffn.gate" in sites) == (name in GATED)
        assert ("attn.cross.q" in sites) == layer.startswith("decoder") * (name in ("bart", "mbart", "t5", "t5-gated"))


@pytest.mark.parametrize("name", zoo.ALL)
def test_q_and_v_are_the_targets_of_peft(name: str, tables: dict[str, SiteTable]) -> None:
    table = tables[name]
    expected = PEFT_TARGETS.get(table.model_type)
    if expected is None:
        pytest.skip(f"PEFT has no targets for {table.model_type}")
    ours = {s.module.rpartition(".")[2] for s in table.sites if last(s) in ("q", "v") and len(s.steps) > 3}
    assert ours == set(expected), (ours, expected)


def test_a_fused_projection_is_three_slices(tables: dict[str, SiteTable]) -> None:
    table = tables["gpt2"]
    rows = {
        last(s): s.states["h"].activation.rows for s in table.sites if s.path.startswith("decoder.layer[0].attn.self.")
    }
    d = table.d_model
    assert [(rows[r].start, rows[r].stop) for r in "qkv"] == [(0, d), (d, 2 * d), (2 * d, 3 * d)]
    assert rows["o"] is None


def test_states_of_a_sub_layer(tables: dict[str, SiteTable]) -> None:
    bart = {s.path: s for s in tables["bart"].sites}
    cross = bart["decoder.layer[0].attn.cross"]
    assert set(cross.states) == {"x", "h", "c", "res", "q", "k", "v", "kv"}
    assert cross.states["h"].linear == "decoder.layer[0].attn.cross.o"
    assert cross.group == "decoder.cross"
    assert cross.frozen_modules == {"norm": "model.decoder.layers.0.encoder_attn_layer_norm"}
    opt = {s.path: s for s in tables["opt"].sites}
    assert opt["decoder.layer[0].ffn"].layer_input is not None, "OPT flattens batch and tokens in its ffn"
    assert opt["decoder.layer[0].attn.self"].layer_input is None


@pytest.mark.parametrize(
    ("name", "finals"),
    [("llama", ["decoder.norm"]), ("t5", ["encoder.norm", "decoder.norm"]), ("bart", []), ("bert", [])],
)
def test_final_norms_run_after_the_last_layer(name: str, finals: list[str], tables: dict[str, SiteTable]) -> None:
    assert [s.path for s in tables[name].sites if last(s) == "norm" and len(s.steps) == 2] == finals


def test_layers_of_one_structure_are_traced_once() -> None:
    analysis = analyse(zoo.build("llama", num_hidden_layers=7))
    assert len({id(k) for s in analysis.structure.stacks for k in s.kinds}) == 1
    assert len(analysis.structure.stacks[0].layers) == 7
