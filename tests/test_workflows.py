"""The scripts of examples/workflows check themselves; `make workflows` builds what they import."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv-workflows" / "bin" / "python"
SCRIPTS = sorted(path for path in (ROOT / "examples" / "workflows").glob("*.py") if path.stem != "models")


IMPORTS = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)


@pytest.mark.skipif(not PYTHON.exists(), reason="`make workflows` has not been run")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_workflow_runs(script: Path) -> None:
    names = sorted({*IMPORTS.findall(script.read_text(encoding="utf-8"))} - {"models"})
    code = f"from importlib.util import find_spec\nprint(*[n for n in {names} if find_spec(n) is None])"
    if missing := subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip():
        pytest.skip(f"`make workflows` has not been run since it installs {missing}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([PYTHON, script], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert " agree" in result.stdout


def test_every_workflow_is_here() -> None:
    assert [script.stem for script in SCRIPTS] == [
        "adapters",
        "deployment",
        "diffusion",
        "exchange",
        "merging",
        "modalities",
        "offloaded_pipelines",
        "preferences",
        "sentences",
        "tokens",
        "trainers",
        "trl_trainers",
        "zero3",
    ]
