"""DDP and FSDP2 on two processes: the losses and the parameters of one process on the whole
batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peftc
from peftc.adapters.files import read
from tests import zoo
from tests.matrix import FULL
from tests.survival.harness import SPECIES, all_close, freshly_compiled
from tests.survival.workers import halves, run, take_turns, work

WORLD = 2
EACH = [(name, ("weights", "lora", "mam")[i % 3]) for i, name in enumerate(SPECIES)]
CASES = [("llama", "weights"), ("bart", "mam"), *(EACH if FULL else [("bert", "weights")])]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """One pair of processes runs everything: starting them costs more than the runs."""
    where = tmp_path_factory.mktemp(request.param)
    torch.multiprocessing.spawn(work, args=(WORLD, request.param, CASES, str(where)), nprocs=WORLD)
    return request.param, where


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_two_processes_are_one(directory: tuple[str, Path], name: str, spec: str) -> None:
    way, where = directory
    report = torch.load(where / f"{way}-{name}-{spec}.pt")
    model = freshly_compiled(name, spec).train()
    first = {n: p.detach().clone() for n, p in peftc.parameters(model).items()}
    losses = run(model, [p for p in model.parameters() if p.requires_grad], halves(name, model))
    assert losses == pytest.approx(report["losses"], rel=1e-6)
    end = {n: p.detach() for n, p in peftc.parameters(model).items()}
    all_close(report["parameters"], end, 1e-7)
    assert any((end[n] - first[n]).abs().max() > 1e-3 for n in end)
    loaded = peftc.load(where / f"adapter-{way}-{name}-{spec}", zoo.build(name, torch.float64)).train()
    batch = halves(name, model)[0]
    assert (loaded(**batch).loss - model(**batch).loss).abs() < 1e-7


@pytest.mark.parametrize(("name", "spec"), CASES)
def test_an_adapter_saved_from_shards(directory: tuple[str, Path], name: str, spec: str, tmp_path: Path) -> None:
    """The same names, shapes and base fingerprint as from one process."""
    way, where = directory
    peftc.save(freshly_compiled(name, spec), tmp_path)
    one, two = (read(path)[0] for path in (tmp_path, where / f"adapter-{way}-{name}-{spec}"))
    assert one.tensors == two.tensors
    assert one.base == two.base
    assert one.spec == two.spec


def test_a_failed_save_raises_in_all_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(take_turns, args=(WORLD, str(tmp_path)), nprocs=WORLD)
    assert [(tmp_path / f"events-{rank}").read_text() for rank in range(WORLD)] == [
        "writes writes P526",
        "waits waits P526",
    ]
