"""What the front end costs: a cold `check`, a plan by a cached table, a line of a long spec.

CPU time, medians of five. The plan is a ratio to what any program on the model imports.

    python -m benchmarks.front
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

from peftc.syntax.parser import parse_text

REPEATS, LINES = 5, 10_000
PLAN = ("-m", "peftc", "plan", "specs/mam.peft", "--model", "facebook/bart-large")
BARE = ("-c", "import torch, transformers; from transformers import BartForConditionalGeneration")
LINE = "edit e{} at layer[{}].ffn {{ h += 4 * adapter(x, r=512, act=relu, init=lora) }}\n"


def process(*arguments: str) -> float:
    """Seconds of CPU of a cold process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def parsing() -> float:
    """Milliseconds of CPU for a line."""
    text = "peft 1\n" + "".join(LINE.format(number, number % 32) for number in range(LINES))
    start = time.process_time()
    parse_text(text)
    return (time.process_time() - start) / LINES * 1e3


def middle(measure: Callable[[], float]) -> float:
    return median(measure() for _ in range(REPEATS))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PEFTC_CACHE"] = folder
        process(*PLAN)  # keeps the table
        pairs = [(process(*PLAN), process(*BARE)) for _ in range(REPEATS)]
    print(f"check, cold: {middle(lambda: process('-m', 'peftc', 'check', 'specs/mam.peft')):.2f} s (goal 0.20)")
    print(f"plan, cached ÷ bare imports: {median(plan / bare for plan, bare in pairs):.3f} (goal 0.1)")
    print(f"parser: {middle(parsing):.3f} ms a line at {LINES:,} lines (goal 0.1)")


if __name__ == "__main__":
    main()
