"""`python -m tests.merging.kills [--moments 200]`: SIGKILL at random moments of a merge, after each
of which the new checkpoint is absent or complete.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

import peftc
from benchmarks.common import machine, save, table
from peftc.merging.destination import PREFIX
from peftc.merging.other_files import REPORT
from tests.merging.checkpoints import LORA, save_adapter, save_base
from tests.processes import KILLED, end_of, fork

FOLDERS = 4  # that are merged into, in turns
JOBS = (1, 2)
PATIENCE = 20.0  # seconds for processes of a merge that was killed


def files(folder: Path) -> dict[str, bytes]:
    """By relative path; the report names its folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != REPORT)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def remains(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(PREFIX)]


def kill_merges(root: Path, moments: int, jobs: int, **base_options: int) -> Counter[str]:
    """How often a merge was `killed` or had `ended`, and the new checkpoint was `absent`,
    `complete` or `partial`. One merge of ten ends by itself.

    Raises: AssertionError where the next merge leaves remains.
    """
    base, adapter, outcomes = root / "base", root / "adapter", Counter[str]()
    cls = save_base(base, "llama", torch.bfloat16, "1MB", **base_options)
    save_adapter(adapter, base, cls, LORA)
    peftc.merge(base, adapter, root / "whole")
    whole = files(root / "whole")
    start = time.perf_counter()
    assert end_of(fork(lambda: peftc.merge(base, adapter, root / "other", jobs=jobs))) == 0
    seconds, generator = time.perf_counter() - start, random.Random(0)
    for i in range(moments):
        out = root / f"out{i % FOLDERS}"
        process = fork(lambda out=out: peftc.merge(base, adapter, out, jobs=jobs))
        if i % 10:
            time.sleep(generator.uniform(0, 1.3 * seconds))
            os.kill(process, signal.SIGKILL)
        code = end_of(process)
        assert code in (0, KILLED), code
        outcomes["killed" if code == KILLED else "ended"] += 1
        outcomes["absent" if not out.exists() else "complete" if files(out) == whole else "partial"] += 1
        shutil.rmtree(out, ignore_errors=True)
    for i in range(FOLDERS):  # the next merge into a folder removes what is left of earlier ones
        wait_for_processes(root)
        assert end_of(fork(lambda i=i: peftc.merge(base, adapter, root / f"out{i}", jobs=jobs))) == 0
    assert not remains(root), remains(root)
    return outcomes


def wait_for_processes(root: Path) -> None:
    """Until no process of a merge that was killed has the lock of its folder."""
    from peftc.filesystem.atomic import lock

    start = time.monotonic()
    for name in remains(root):
        with lock(root / name, patience=PATIENCE) as is_locked:
            assert is_locked, f"a process of a merge that was killed is alive after {time.monotonic() - start:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kills", description=__doc__)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = dict[str, dict[str, int]]()
    for jobs in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            own = kill_merges(Path(folder), options.moments, jobs)
            results[f"{jobs}"] = {name: own[name] for name in ("killed", "ended", "absent", "complete", "partial")}
    columns = ["killed", "absent", "complete", "partial"]
    rows = [[jobs, *(str(own[column]) for column in columns)] for jobs, own in results.items()]
    text = f"{options.moments} merges for each number of processes; SIGKILL at random moments.\n\n"
    text += table(["processes", *columns], rows)
    print(text)
    if not options.no_save:
        save("kills", {"moments": options.moments, "jobs": results}, text, machine())
    return int(any(own["partial"] for own in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
