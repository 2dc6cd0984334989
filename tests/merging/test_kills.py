"""A merge that is killed at any moment leaves no output, or a complete one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import peftc
from peftc.merging.destination import PREFIX
from tests.matrix import FULL
from tests.merging.checkpoints import LORA, save_adapter, save_base, tensors
from tests.processes import KILLED, fork

MOMENTS = 200 if FULL else 40


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_killed_merge_leaves_nothing_or_all(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    cls = save_base(base, "llama", torch.bfloat16)
    save_adapter(adapter, base, cls, LORA)
    peftc.merge(base, adapter, tmp_path / "whole")
    report = "peftc-merge.json"
    whole = {name: data for name, data in files(tmp_path / "whole").items() if name != report}
    start = time.perf_counter()
    os.waitpid(fork(lambda: peftc.merge(base, adapter, tmp_path / "other")), 0)
    seconds, generator = time.perf_counter() - start, random.Random(0)
    outcomes = {"absent": 0, "complete": 0}
    for i in range(MOMENTS):
        out = tmp_path / f"out{i % 4}"
        process = fork(lambda out=out: peftc.merge(base, adapter, out))
        if i % 10:  # the others end by themselves
            time.sleep(generator.uniform(0, 1.3 * seconds))
            os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert code in (0, KILLED)
        if out.exists():
            assert {name: data for name, data in files(out).items() if name != report} == whole
            outcomes["complete"] += 1
            for path in sorted(out.iterdir()):
                path.unlink()
            out.rmdir()
        else:
            outcomes["absent"] += 1
    assert all(outcomes.values()), outcomes
    remains = [path.name for path in tmp_path.iterdir() if path.name.startswith(PREFIX)]
    for i in range(4):  # the next merge into a folder removes what is left of earlier ones
        peftc.merge(base, adapter, tmp_path / f"out{i}")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(PREFIX)] == [], remains


def test_a_merge_leaves_the_folder_of_another_that_runs(tmp_path: Path) -> None:
    from peftc.merging.destination import destination

    with ExitStack() as stack:
        first = stack.enter_context(destination(tmp_path / "out"))
        with destination(tmp_path / "out") as second:
            assert first.is_dir()
            (second / "x").write_text("")
        assert first.is_dir()
        with pytest.raises(peftc.PeftcError, match="P703"):
            stack.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x"]


MEMORY = """
import sys
from pathlib import Path

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

import peftc.merging
start = peak()
peftc.merge(*sys.argv[1:])
print(peak() - start)
"""


def test_memory_is_that_of_the_largest_tensors(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    options = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 4096}
    cls = save_base(base, "llama", torch.bfloat16, "30MB", **options)
    save_adapter(tmp_path / "adapter", base, cls, LORA)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    command = [sys.executable, "-c", MEMORY, str(base), str(tmp_path / "adapter"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert size > 150e6
    assert int(ran.stdout.splitlines()[-1]) < 0.5 * size
    assert tensors(out).keys() == tensors(base).keys()
