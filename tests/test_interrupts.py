"""SIGINT at each line from the first write to the end of an operation leaves the model as before or
as after.

`make interrupts` covers all lines, and operations that consist of these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GROUPS = {
    "whole": ("", ["compile", "load", "fold", "remove", "disabled", "task", "set_enabled"]),
    "long": ("adapters/,filesystem/atomic,installation/journal,training/tasks", ["save", "add_task"]),
}


@pytest.mark.parametrize("group", GROUPS)
def test_an_interrupt_leaves_the_model_before_or_after(group: str) -> None:
    """For long operations, only the lines around writes."""
    paths, names = GROUPS[group]
    command = [sys.executable, "-m", "tests.interrupts.run", "--written", "--json", "--paths", paths, *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    outcomes = json.loads(done.stdout)
    assert {name: one["between"] for name, one in outcomes.items()} == {name: [] for name in names}
    assert all(one["lines"] and not one["swallowed"] for one in outcomes.values()), outcomes
