"""The kernels for GPUs compute what operations do: here by Triton's interpreter, on the CPU."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from peftc.runtime.fused_low_rank import parts_of_sum

TRITON = Path(sys.prefix) / "triton"  # where `make` installs it: on the path, other libraries would take it for theirs
ROOT = Path(__file__).resolve().parents[2]


@cache
def report() -> Any:
    if not TRITON.is_dir():
        pytest.skip("triton is not installed")
    path = os.pathsep.join([str(TRITON), str(ROOT)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.devices.interpreted"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["kernel", "compiled"])
def test_a_linear_with_a_low_rank_term(kind: str) -> None:
    errors = report()[kind]
    assert len(errors) >= 5
    assert {name: error for name, error in errors.items() if not error <= 1e-3} == {}


def test_what_the_kernel_is_not_for() -> None:
    assert report()["refused"] == [
        "rows",
        "rank",
        "dtype of x",
        "dtype of an adapter",
        "float32",
        "rows of a larger weight",
        "factors for each row",
        "a class of its own",
    ]


def test_an_exported_model_has_operations_of_torch_alone() -> None:
    assert [name for name in report()["exported"] if "partial_sums" in name] == []


@pytest.mark.parametrize("multiprocessors", [28, 108, 132])
@pytest.mark.parametrize("inputs", [64, 512, 2048, 14336])
@pytest.mark.parametrize("outputs", [64, 2048, 14336])
def test_the_parts_of_a_sum(outputs: int, inputs: int, multiprocessors: int) -> None:
    """One if the outputs fill the device, and more if they do not: none shorter than 512 inputs."""
    parts = parts_of_sum(outputs, inputs, multiprocessors)
    assert 1 <= parts <= 7
    assert parts == 1 or inputs / parts >= 512
    if outputs / 64 >= 1.5 * multiprocessors:
        assert parts == 1
    assert parts_of_sum(outputs, inputs, 0) == 0
