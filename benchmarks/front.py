"""What the front end costs: a cold `check`, a plan by a cached table, a line of a long spec.

    python -m benchmarks.front [--repeats 5]

CPU time, medians. `check` is in seconds. The plan is a ratio to what any program on the model
imports, of processes side by side. The parser is in milliseconds a line of 10,000 lines. Exits with
1 where a goal is missed.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

from benchmarks.common import machine, save, table
from peftc.syntax.parser import parse_text

LINES = 10_000
PLAN = ("-m", "peftc", "plan", "specs/mam.peft", "--model", "facebook/bart-large")
BARE = ("-c", "import torch, transformers; from transformers import BartForConditionalGeneration")
CHECK = ("-m", "peftc", "check", "--isolated", "specs/mam.peft")  # not on the models of peftc.toml
LINE = "edit e{} at layer[{}].ffn {{ h += 4 * adapter(x, r=512, act=relu, init=lora) }}\n"
GOALS = {"check, cold, s": 0.20, "plan, cached ÷ bare imports": 0.1, "parser, ms a line": 0.1}


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


def plan_ratio() -> float:
    return process(*PLAN) / process(*BARE)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    measures: dict[str, Callable[[], float]] = dict(
        zip(GOALS, (lambda: process(*CHECK), plan_ratio, parsing), strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PEFTC_CACHE"] = folder
        process(*PLAN)  # writes the table into the cache
        samples = {name: [measure() for _ in range(options.repeats)] for name, measure in measures.items()}
    medians = {name: median(values) for name, values in samples.items()}
    rows = [[name, f"{value:.3f}", f"{GOALS[name]:g}"] for name, value in medians.items()]
    text = f"The front end, in CPU time.\n\n{table(['', 'median', 'goal'], rows)}"
    print(text)
    if not options.no_save:
        save("front", {"medians": medians, "samples": samples, "goals": GOALS}, text, machine())
    return int(any(medians[name] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    sys.exit(main())
