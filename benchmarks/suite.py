"""What `make test` costs: minutes of CPU, and minutes on this machine.

    python -m benchmarks.suite

CPU time is that of all processes of the run; nothing else should run beside it. Exits with 1 where
a test fails, and then keeps nothing.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time

from benchmarks.common import machine, save, table


def main() -> int:
    start, before = time.perf_counter(), cpu_seconds()
    run = subprocess.Popen(["make", "test"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    last = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        last = line if re.search(r"\d+ passed", line) else last
    if run.wait() != 0:
        return 1
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|xfailed)", last)}
    cpu, wall = (round(seconds / 60, 1) for seconds in (cpu_seconds() - before, time.perf_counter() - start))
    rows = [[f"{counts['passed']:,}", f"{cpu:.1f}", f"{wall:.1f}"]]
    text = table(["tests", "minutes of CPU", "minutes"], rows)
    save("suite", {"counts": counts, "cpu": cpu, "wall": wall}, text, machine())
    print(text)
    return 0


def cpu_seconds() -> float:
    """CPU time of the child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main())
