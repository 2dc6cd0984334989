"""Under `torchrun`, each rank writes files of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import peftc
from tests.merging.checkpoints import LORA, save_adapter, save_base

PROGRAM = """
import sys
import peftc

peftc.merge(*sys.argv[1:], verify=True)
"""


def test_ranks_write_the_same_files(tmp_path: Path) -> None:
    base = tmp_path / "base"
    cls = save_base(base, "llama", torch.bfloat16)
    save_adapter(tmp_path / "adapter", base, cls, LORA)
    peftc.merge(base, tmp_path / "adapter", tmp_path / "out")
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = [str(tmp_path / name) for name in ("program.py", "base", "adapter", "ranks")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *paths]
    path = os.pathsep.join([str(Path(peftc.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    one, other = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("out", "ranks"))
    assert len(one) > 2
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
    report = (tmp_path / "ranks" / "peftc-merge.json").read_text()
    assert report.count('"parameter"') == 6
