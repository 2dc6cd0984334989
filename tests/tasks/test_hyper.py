"""Hypernetwork adapters: networks shared by all tasks, and one embedding for each task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import close
from tests.tasks.test_tasks import TASKS, compiled, one_by_one, three

T = 5
SPEC = f"peft 1\nedit e at layer[*].attn | layer[*].ffn per task {{ h += hyper(h, r=2, t={T}, m=4, nets=positions) }}"


def test_each_row_uses_its_own_task() -> None:
    model = compiled("bart", SPEC)
    inputs = three("bart", model)
    alone = one_by_one(model, inputs)
    assert not torch.allclose(alone[0], alone[1])
    with peftc.task(model, task_ids=[TASKS[i] for i in (2, 0, 1)]):
        close(model(**inputs).logits, torch.stack([alone[2][0], alone[0][1], alone[1][2]]), "mixed")


def test_a_task_costs_one_embedding() -> None:
    config = zoo.config("bart")
    trained = [peftc.plan(SPEC, config, tasks=TASKS[:n]).totals.trained for n in (1, 2, 3)]
    assert [trained[1] - trained[0], trained[2] - trained[1]] == [T, T]
    model = compiled("bart", SPEC)
    own = [key for key in peftc.parameters(model) if key.endswith("embedding")]
    assert len(own) == len(TASKS)
    assert trained[2] == sum(p.numel() for p in peftc.parameters(model).values())


def test_networks_learn_from_all_tasks_and_embeddings_from_their_own() -> None:
    model = compiled("llama", SPEC)
    with peftc.task(model, task_ids=torch.tensor([0, 2, 2])):
        model(**three("llama", model)).logits.pow(2).sum().backward()
    for key, parameter in peftc.parameters(model).items():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
        assert has_gradient == (not key.endswith("embedding") or "mnli" not in key), key


def test_tasks_are_added_dropped_and_saved(tmp_path: Path) -> None:
    model = compiled("llama", SPEC)
    inputs = three("llama", model)
    before = one_by_one(model, inputs)
    peftc.add_task(model, "new", like="mnli")
    peftc.drop_task(model, "sst")
    want = (before[1], before[2], before[1])
    assert all(torch.equal(a, b) for a, b in zip(one_by_one(model, inputs), want, strict=True))
    peftc.save(model, tmp_path)
    loaded = peftc.load(tmp_path, zoo.build("llama", torch.float64)).eval()
    assert all(torch.equal(a, b) for a, b in zip(one_by_one(loaded, inputs), want, strict=True))


def test_layers_and_positions_have_embeddings_of_their_own() -> None:
    model = peftc.compile(SPEC.replace(" per task", ""), zoo.build("bart"))
    by_name = {key.rpartition(".")[2]: p for key, p in peftc.parameters(model).items()}
    assert by_name["layers"].shape == (5, T)  # two in the encoder, three in the decoder
    assert by_name["positions"].shape == (3, T)  # self-attention, cross-attention, ffn
    assert "up_2" in by_name


def test_adapters_of_one_network_have_one_size() -> None:
    spec = "peft 1\nedit e at layer[*].ffn | layer[*].ffn.hidden { h += hyper(h, r=2) }"
    with pytest.raises(peftc.PeftcError, match="P305") as excinfo:
        peftc.plan(spec, zoo.config("bart"))
    assert "nets=positions" in str(excinfo.value)
    assert peftc.plan(spec.replace("r=2", "r=2, nets=positions"), zoo.config("bart")).totals.trained
