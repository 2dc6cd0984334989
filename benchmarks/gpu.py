"""What an unmerged LoRA costs on a GPU, in bfloat16, with everything compiled by `torch.compile`.

    python -m benchmarks.gpu [--rounds 30] [--shapes 1B,7B]

As `benchmarks.overhead`, for whoever has a CUDA device: the shape of 1B wants 16 GB of memory, that
of 7B 60 GB. Adapters are in bfloat16, too. Without a device there is a message, and the exit status
is 0. `--device cpu --tiny` shows that the benchmark itself works, and keeps nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common import machine, save
from benchmarks.contenders import MAKE, WORK, Shape, Work, contenders, floor, line, measured, overheads, tabulated

SHAPES = (
    Shape("1B", 2048, 5632, 22, 32, 4, 32000, batch=4, tokens=512),
    Shape("7B", 4096, 11008, 32, 32, 32, 32000, batch=1, tokens=1024),
)
TINY = (Shape("tiny", 32, 48, 1, 4, 2, 64, batch=2, tokens=8, decoded=3),)


def clock(device: str) -> Callable[[], float]:
    """Seconds, after the device has finished."""

    def read() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return read


def compiled(model: nn.Module, work: str, backend: str, shape: Shape) -> Work:
    """A work of a torch-compiled model; for token-by-token decoding, with dynamic shapes."""
    torch.compiler.reset()
    module: Any = torch.compile(model, backend=backend, dynamic=True if work == "decode" else None)
    run = MAKE[work](module, shape)
    for _ in range(2):
        run()
    return run


def row(models: dict[str, nn.Module], work: str, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One work of all contenders."""
    works = {name: compiled(model, work, options.backend, shape) for name, model in models.items()}
    seconds = measured(works, options.rounds, clock(options.device))
    return {"shape": str(shape), "work": work, "seconds": seconds, "floor": floor(models["base"], shape, work)}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--work", default=",".join(WORK), help=f"which of {', '.join(WORK)}")
    parser.add_argument("--tiny", action="store_true", help="a model of one small layer")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return 0
    rows: list[dict[str, Any]] = []
    for shape in TINY if options.tiny else [s for s in SHAPES if s.name in options.shapes.split(",")]:
        models = contenders(shape.base(torch.bfloat16, options.device), "bfloat16")
        for work in options.work.split(","):
            rows.append(row(models, work, shape, options))
            print(" | ".join(line(str(shape), work, rows[-1]["seconds"], rows[-1]["floor"])), flush=True)
    lines = [line(r["shape"], r["work"], r["seconds"], r["floor"]) for r in rows]
    text = (
        f"LoRA (r=16) on all Linears, unmerged, bfloat16, torch.compile: its cost over the base.\n\n{tabulated(lines)}"
    )
    print(f"\n{text}")
    if options.device == "cuda" and not options.tiny:
        results = [{**r, "over": overheads(r["seconds"])} for r in rows]
        save("gpu", {"rounds": options.rounds, "results": results}, text, machine("cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
