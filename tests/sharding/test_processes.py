"""Tensor parallelism, FSDP2 and both: the losses of one process, and the bits of adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import peftc
from peftc.adapters.files import read
from tests.matrix import FULL
from tests.sharding.worker import (
    ATTACHED,
    ATTACHMENTS,
    CASES,
    EDITS,
    REFUSED,
    SPECS,
    batches,
    build,
    get_model_state_dict,
    losses,
    work,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
SPLIT = "peft 2  train q = [w] at layer[*].attn.q"
WORLDS = (2, 4) if FULL else (2,)
SAVED = [(way, order) for way, order, spec in CASES if spec == "all"]


@pytest.fixture(scope="module", params=WORLDS, ids="{} processes".format)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One set of processes runs everything: starting them costs more than the runs."""
    folder = tmp_path_factory.mktemp("sharding")
    build().save_pretrained(folder / "base")
    model = peftc.compile(SPECS["all"], build(), seed=0)
    losses(model, batches())
    peftc.save(model, folder / "adapter-one")
    dcp.save(get_model_state_dict(model, options=EDITS), checkpoint_id=folder / "checkpoint-one", no_dist=True)
    torch.save({n: p.detach() for n, p in peftc.parameters(model).items()}, folder / "values-one.pt")
    for seed, (name, spec) in enumerate({**ATTACHED, "split": SPLIT}.items()):
        own = peftc.compile(spec, build(), seed=seed)
        losses(own, batches())
        peftc.save(own, folder / name)
    torch.multiprocessing.spawn(work, args=(request.param, str(folder)), nprocs=request.param)
    return json.loads((folder / "report.json").read_text()), folder


@pytest.fixture(scope="module")
def single() -> dict[str, list[float]]:
    """The losses of one process, by spec."""
    specs = dict.fromkeys(spec for _, _, spec in CASES)
    return {spec: losses(peftc.compile(SPECS[spec], build(), seed=0), batches()) for spec in specs}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_processes_have_the_losses_of_one(
    report: tuple[dict[str, Any], Path], single: dict[str, list[float]], case: tuple[str, str, str]
) -> None:
    wanted = single[case[2]]
    assert report[0]["-".join(case)]["losses"] == pytest.approx(wanted, rel=1e-9)
    assert max(wanted) - min(wanted) > 1e-3


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("a/decoder.layer[0].attn.self.q/lora.A", "(Replicate(),)"),
        ("a/decoder.layer[0].attn.self.q/lora.B", "(Shard(dim=0),)"),
        ("a/decoder.layer[0].ffn.down/lora.A", "(Shard(dim=1),)"),
        ("a/decoder.layer[0].ffn.down/lora.B", "(Replicate(),)"),
        ("f/decoder.layer[0].ffn/adapter.up", "(Replicate(),)"),
    ],
)
@pytest.mark.parametrize("case", ["tp-first-all", "tp-last-all", "plan-last-all"])
def test_parameters_are_sharded_as_their_equation_says(
    report: tuple[dict[str, Any], Path], case: str, name: str, placement: str
) -> None:
    """So are their gradients: none is left as parts of a sum."""
    assert report[0][case]["placements"][name] == [placement, placement]


def test_a_prefix_is_sharded_by_heads(report: tuple[dict[str, Any], Path]) -> None:
    assert report[0]["plan-last-all"]["placements"]["p/decoder.layer[0].attn.self/prefix.key"][0] == "(Shard(dim=0),)"


def test_what_is_not_derived_is_whole(report: tuple[dict[str, Any], Path]) -> None:
    own = report[0]["tp-last-whole"]["placements"]
    assert {placement for pair in own.values() for placement in pair} == {"(Replicate(),)"}
    assert not report[0]["tp-last-shared"]["placements"]  # what sites share is not distributed


@pytest.mark.parametrize("case", ATTACHMENTS, ids="-".join)
def test_attached_adapters_are_those_of_one_process(report: tuple[dict[str, Any], Path], case: tuple[str, str]) -> None:
    own = report[0]["attached"]["-".join(case)]
    assert "swap" in own
    assert max(own.values()) < 1e-10


def test_whole_values_of_a_split_weight_are_refused(report: tuple[dict[str, Any], Path]) -> None:
    assert report[0]["split"] == ["P448"] * 2


def test_refusals(report: tuple[dict[str, Any], Path]) -> None:
    heads, inner, shared = (" ".join(report[0]["-".join(case)]) for case in REFUSED)
    assert heads.startswith("P448")
    assert "t(values) @ dropout(act(scores), dropout)" in heads
    assert inner.startswith("P448")
    assert "`z`" in inner
    assert shared.startswith("P449")
    assert "vera" in shared


@pytest.mark.parametrize(("way", "order"), SAVED)
def test_an_adapter_of_shards_is_that_of_one_process(report: tuple[dict[str, Any], Path], way: str, order: str) -> None:
    """It loads with the same bits; saving gathers the tensors of the adapter, and no others."""
    result, folder = report
    own = result[f"{way}-{order}-all"]
    assert own["gathered"] == own["values"] > 0
    wanted = torch.load(folder / f"values-{way}-{order}.pt")
    model = peftc.load(folder / f"adapter-{way}-{order}", build())
    assert all(torch.equal(p, wanted[name]) for name, p in peftc.parameters(model).items())
    one, saved = read(folder / "adapter-one")[0], read(folder / f"adapter-{way}-{order}")[0]
    assert saved.weights_digest == one.weights_digest
    assert saved.tensors == one.tensors


@pytest.mark.parametrize(("way", "order"), SAVED)
def test_a_distributed_checkpoint_loads_in_one_process(
    report: tuple[dict[str, Any], Path], way: str, order: str
) -> None:
    folder = report[1]
    model = peftc.compile(SPECS["all"], build(), seed=1)
    state = get_model_state_dict(model, options=EDITS)
    dcp.load(state, checkpoint_id=folder / f"checkpoint-{way}-{order}", no_dist=True)
    wanted = torch.load(folder / f"values-{way}-{order}.pt")
    assert len(state) == len(wanted)
    assert all(torch.equal(p, wanted[name]) for name, p in peftc.parameters(model).items())


def test_adapters_and_checkpoints_of_one_process_load_in_all(report: tuple[dict[str, Any], Path]) -> None:
    assert report[0]["loading"]
    assert all(report[0]["loading"].values()), report[0]["loading"]


def test_calls_of_a_model_that_transformers_has_sharded(report: tuple[dict[str, Any], Path]) -> None:
    calls = report[0]["calls"]
    assert calls["moved"] > 1e-3
    assert max(calls["edited"], calls["off"], calls["removed"]) < 1e-12
    assert calls["generated"]
    assert calls["verified"] == "P601"
