"""Processes killed while they save: the folder then has one of the adapters, complete, and the next
save succeeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch

import peftc
from benchmarks.adversarial.outcome import Tally
from peftc.adapters.files import read
from tests import zoo
from tests.laws.harness import randomise
from tests.processes import KILLED, end_of, fork, killed_at

SPEC = "peft 1\nedit e at layer[*].attn.q { h += lora(x, r=2) }"


def adapters(count: int) -> list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]:
    """Models with the same spec and other parameters."""
    models = list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]()
    for _ in range(count):
        model = peftc.compile(SPEC, zoo.build("llama"))
        randomise(peftc.parameters(model))
        models.append((model, {name: p.detach().clone() for name, p in peftc.parameters(model).items()}))
    return models


def which(folder: Path, tensors: list[dict[str, torch.Tensor]]) -> int:
    """The number of the adapter in a folder."""
    there = read(folder)[1]
    for number, expected in enumerate(tensors):
        if there.keys() == expected.keys() and all(torch.equal(there[name], expected[name]) for name in there):
            return number
    raise AssertionError(f"what is in {folder} is none of the adapters")


def clean(folder: Path) -> None:
    file = json.loads((folder / "adapter.json").read_text())["file"]
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(["adapter.json", file]), f"left behind: {files}"


def run(at_random: int, seed: int, tally: Tally) -> None:
    """A kill at every boundary of a save, into a new folder and over an adapter; then some at
    random times.
    """
    draw = random.Random(seed)
    compiled = adapters(3)
    models, tensors = [model for model, _ in compiled], [values for _, values in compiled]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        peftc.save(models[0], root / "old")
        for over in (False, True):
            for n in range(1, 200):
                folder = root / f"{over}-{n}"
                if over:
                    shutil.copytree(root / "old", folder)
                ended = killed_at(n, folder, lambda folder=folder: peftc.save(models[1], folder))
                if ended == 0:
                    break
                tally.counts["at a boundary"] += ended == KILLED
                tally.run(
                    f"boundary {n}, over {over}", lambda f=folder, over=over: survived(f, models[2], tensors, over)
                )
        folder = root / "again"
        peftc.save(models[0], folder)
        seconds = duration(models[0], root / "timed")
        for number in range(at_random):
            process = fork(lambda folder=folder: forever(models, folder))
            time.sleep(draw.uniform(0, 4 * seconds))
            os.kill(process, signal.SIGKILL)
            tally.counts["at random"] += end_of(process) == KILLED
            then = None if number % 5 else models[0]
            tally.run(f"kill {number} at random", lambda then=then: survived(folder, then, tensors, True))


def duration(model: torch.nn.Module, folder: Path) -> float:
    start = time.perf_counter()
    for _ in range(5):
        peftc.save(model, folder)
    return (time.perf_counter() - start) / 5


def forever(models: list[torch.nn.Module], folder: Path) -> None:
    while True:
        for model in models:
            peftc.save(model, folder)


def survived(
    folder: Path, then: torch.nn.Module | None, tensors: list[dict[str, torch.Tensor]], was_there: bool
) -> None:
    """The folder has one of the adapters, or is empty where it was empty. Saving `then` leaves no
    other files.
    """
    if was_there or (folder / "adapter.json").exists():
        which(folder, tensors)
    if then is not None:
        peftc.save(then, folder)
        which(folder, tensors)
        clean(folder)
