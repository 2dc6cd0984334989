"""One of the two processes of `test_distributed.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import peftc
from peftc.adapters.base import elect_writer
from tests.survival.harness import freshly_compiled, layers, model_inputs

STEPS, BATCH = 3, 4


def halves(name: str, model: nn.Module, rank: int | None = None) -> list[dict[str, Tensor]]:
    """One rank's half of each batch. Batches have no padding, so the mean of both halves is the
    mean of the batch.
    """
    whole = [model_inputs(name, model, batch=BATCH, padding=None, seed=i) for i in range(STEPS)]
    if rank is None:
        return whole
    part = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    return [{k: v[part] for k, v in batch.items()} for batch in whole]


def run(
    model: nn.Module, learning: list[nn.Parameter], batches: list[dict[str, Tensor]], world: int = 1
) -> list[float]:
    """The losses of a few steps of AdamW, averaged over processes."""
    optimizer = torch.optim.AdamW(learning, lr=0.01)
    losses: list[float] = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def sharded(model: nn.Module) -> nn.Module:
    """FSDP2 as in its documentation: each layer, then the root."""
    for _, layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def work(rank: int, world: int, way: str, cases: list[tuple[str, str]], directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/{way}", rank=rank, world_size=world)
    for name, spec in cases:
        report = one(rank, world, way, name, spec, Path(directory))
        if rank == 0:
            torch.save(report, Path(directory) / f"{way}-{name}-{spec}.pt")
    dist.barrier()
    os._exit(0)  # on a busy machine, shutting gloo's threads down sometimes aborts the process


class Sharded:
    """Imitates a sharded tensor, for code that asks whether one is."""

    def full_tensor(self) -> Tensor:
        return torch.zeros(1)


def take_turns(rank: int, world: int, directory: str) -> None:
    """Saves once normally and once onto a full disk; records each process's outcome."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/turns", rank=rank, world_size=world)
    events: list[str] = []
    for full in (False, True):
        try:
            with elect_writer([cast(Tensor, Sharded())]) as mine:
                events.append("writes" if mine else "waits")
                if mine and full:
                    raise peftc.PeftcError(peftc.Diagnostic("P526", "the disk is full"))
        except peftc.PeftcError as error:
            events += [d.code for d in error.diagnostics]
    Path(directory, f"events-{rank}").write_text(" ".join(events))
    dist.barrier()
    os._exit(0)


def one(rank: int, world: int, way: str, name: str, spec: str, directory: Path) -> dict[str, Any]:
    model = freshly_compiled(name, spec).train()
    batches = halves(name, model, rank)
    wrapper = DistributedDataParallel(model) if way == "ddp" else sharded(model)
    parameters = peftc.parameters(model)
    if way == "fsdp":
        assert all(hasattr(p, "full_tensor") for p in parameters.values()), "not sharded"
    losses = run(wrapper, [p for p in model.parameters() if p.requires_grad], batches, world)
    if way == "fsdp" or rank == 0:
        peftc.save(model, directory / f"adapter-{way}-{name}-{spec}")
    return {"losses": losses, "parameters": {n: whole(p) for n, p in parameters.items()}}
