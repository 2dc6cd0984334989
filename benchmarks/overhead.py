"""What an unmerged LoRA costs at run time: base, peftc, PEFT and merged, on a small and on a wide
LLaMA, on the CPU.

    python -m benchmarks.overhead [--rounds 15] [--shapes small,wide]

All four take turns in one process, on one thread, and CPU time is measured, so that it matters less
what else the machine does. Printed and kept under `results/`: the base's median, the median of what
the others cost over it in the same round, and beside it the least that LoRA could cost: its FLOPs
by those of the base. The goal is half of PEFT's cost; the exit status is 1 where peftc costs more
than PEFT.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch

from benchmarks.common import machine, save
from benchmarks.contenders import MAKE, WORK, Shape, contenders, floor, line, measured, overheads, tabulated

SHAPES = (
    Shape("small", 256, 688, 4, 4, 4, 1000, batch=1, tokens=32),
    Shape("wide", 2048, 5632, 2, 16, 8, 1000, batch=1, tokens=128),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of the wide shape; ten times as many of the small one")
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    for shape in (s for s in SHAPES if s.name in options.shapes.split(",")):
        models = contenders(shape.base(torch.float32, "cpu"))
        for work in WORK:
            works = {name: MAKE[work](model, shape) for name, model in models.items()}
            seconds = measured(works, options.rounds * (10 if shape.name == "small" else 1), time.process_time)
            least = floor(models["base"], shape, work)
            lines.append(line(str(shape), work, seconds, least))
            results.append(
                {"shape": shape.name, "work": work, "over": overheads(seconds), "floor": least} | medians(seconds)
            )
            print(" | ".join(lines[-1]), flush=True)
    text = f"LoRA (r=16) on all Linears, unmerged, float32: what it costs over the base.\n\n{tabulated(lines)}"
    print(f"\n{text}")
    if not options.no_save:
        save("overhead", {"rounds": options.rounds, "results": results}, text, machine())
    return int(any(r["over"]["peftc"] > r["over"]["PEFT"] for r in results))


def medians(seconds: dict[str, list[float]]) -> dict[str, Any]:
    return {"seconds": {name: median(samples) for name, samples in seconds.items()}}


if __name__ == "__main__":
    sys.exit(main())
