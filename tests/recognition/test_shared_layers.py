"""Layers with one set of weights: one site with its number of calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AlbertConfig, AlbertModel, BartConfig

import peftc
from peftc.planning.report.plan import plain_text
from peftc.planning.report.site_tree import render_sites


def config(groups: int) -> AlbertConfig:
    sizes: dict[str, Any] = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return AlbertConfig(vocab_size=61, num_hidden_layers=6, num_hidden_groups=groups, **sizes)


@pytest.mark.parametrize(("groups", "name"), [(1, "layer[0] run 6 times"), (2, "layer[0..1] × 2 run 3")])
def test_a_site_has_its_number_of_calls(groups: int, name: str) -> None:
    table = peftc.sites(config(groups))
    layers = [s for s in table.sites if s.steps[-1][0] == "layer"]
    assert [s.runs for s in layers] == [6 // groups] * groups
    assert name in " ".join(plain_text(render_sites(table, 200), 200).split())


def test_layers_with_weights_of_their_own_run_once() -> None:
    assert {s.runs for s in peftc.sites(BartConfig(encoder_layers=2, decoder_layers=2)).sites} == {1}


def test_an_edit_acts_each_time_with_one_set_of_parameters() -> None:
    torch.manual_seed(0)
    model = AlbertModel(config(1)).eval()
    base, ids = copy.deepcopy(model), torch.randint(0, 61, (2, 5))
    peftc.compile("peft 1\nedit v at layer[*] { h += vector(init=0) }", model, seed=0)
    (vector,) = peftc.parameters(model).values()
    with torch.no_grad():
        vector.copy_(torch.randn(32))
        h = base.encoder.embedding_hidden_mapping_in(base.embeddings(ids))
        for _ in range(6):
            h = base.encoder.albert_layer_groups[0].albert_layers[0](h) + vector
        assert torch.equal(model(ids).last_hidden_state, h)
