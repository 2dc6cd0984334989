"""What planning costs: wall time and peak memory of `peftc plan`, as ratios to the bare `import
torch, transformers`.

    python benchmarks/plan.py [--repeats 5]

Each measurement is a process of its own; the commands take turns, so that a slow minute hits all of
them; medians are printed. Exits with 1 where planning MAM for BART-large takes more than 2 s over
the bare import, or 1 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEFTC = Path(sys.executable).parent / "peftc"
BARE = "import torch, transformers"
MODELS = (
    "facebook/bart-large",
    "bert-base-uncased",
    "t5-11b",
    "meta-llama/Meta-Llama-3-70B",
    "meta-llama/Llama-3.1-405B",
)
SPEC = {name: "mam" if "bart" in name else "lora" for name in MODELS}
SECONDS, MEGABYTES = 2.0, 1000.0


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds and peak megabytes of one process."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - start
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command)} ended with {code}")
    return wall, _megabytes(usage)


def _megabytes(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    commands = {"bare import": [sys.executable, "-c", BARE]}
    for model in MODELS:
        commands[model] = [str(PEFTC), "plan", str(ROOT / "specs" / f"{SPEC[model]}.peft"), "--model", model]
    measure(commands["bare import"])  # warms the file cache
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            runs[name].append(measure(command))
    medians = {name: tuple(map(statistics.median, zip(*samples, strict=True))) for name, samples in runs.items()}
    wall, memory = medians["bare import"]
    print(f"{'':32}{'wall':>8}{'over bare':>11}{'ratio':>7}{'peak':>10}{'ratio':>7}   (medians of {repeats})")
    for name, (seconds, megabytes) in medians.items():
        label = name if name not in SPEC else f"{SPEC[name]} {name}"
        over = f"{seconds - wall:9.2f} s{seconds / wall:7.2f}"
        print(f"{label:32}{seconds:6.2f} s{over}{megabytes:7.0f} MB{megabytes / memory:7.2f}")
    seconds, megabytes = medians[MODELS[0]]
    return int(seconds - wall > SECONDS or megabytes > MEGABYTES)


if __name__ == "__main__":
    sys.exit(main())
