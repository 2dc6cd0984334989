"""A merge that is killed at any moment leaves no output, or a complete one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import peftc
from tests.matrix import FULL
from tests.merging.checkpoints import LORA, save_adapter, save_base, tensors
from tests.merging.kills import JOBS, kill_merges

MOMENTS = 200 if FULL else 20


@pytest.mark.parametrize("jobs", JOBS)
def test_a_killed_merge_leaves_nothing_or_all(jobs: int, tmp_path: Path) -> None:
    outcomes = kill_merges(tmp_path, MOMENTS if jobs == 1 else MOMENTS // 2, jobs)
    assert all(outcomes[name] for name in ("killed", "absent", "complete")), outcomes
    assert not outcomes["partial"]


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
