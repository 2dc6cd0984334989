"""`examples/distributed.py`, as the documentation starts it: the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import FULL

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "examples/distributed.py"
COMMANDS = (
    f"torchrun --nproc-per-node 4 {PROGRAM} --parallel 2",
    f"accelerate launch --multi_gpu --num_processes 4 {PROGRAM} --parallel 2",
)
CLUSTER_COMMANDS = (
    f"torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 {PROGRAM} --parallel 8",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0 --main_process_ip HOST "
    f"--main_process_port 29500 {PROGRAM} --parallel 8",
)


def losses(command: list[str]) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "saved and loaded: 11,920 parameters" in ran.stdout
    return re.findall(r"losses of \d processes: (.*)", ran.stdout)


@pytest.mark.parametrize("command", COMMANDS if FULL else (), ids=lambda command: command.partition(" ")[0])
def test_a_launcher_starts_the_example(command: str) -> None:
    program, *options = command.split()
    wanted = losses([sys.executable, PROGRAM])
    assert len(wanted) == 1
    assert losses([str(Path(sys.executable).parent / program), *options]) == wanted
