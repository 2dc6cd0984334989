"""What an unmerged LoRA costs on a GPU, in bfloat16: a forward, one token, a train step.

    python -m benchmarks.gpu [--rounds 30] [--shapes 1B,8B] [--work forward,decode,train]

For whoever has a CUDA device of 80 GB. Forward and decoding are compiled by `torch.compile` and
stand beside the merged model; decoding has a static cache and CUDA graphs. A train step is
forward and backward, eager and compiled, beside PEFT's; the base without an adapter says how fast
a step could be. Its peak memory is the model's weights and what a step allocates. Adapters are in
bfloat16, and for one row in float32, which is what `get_peft_model` makes of itself. A run replaces
the rows that it measures, and keeps the others with their dates. Without a device there is a
message, and the exit status is 0.
`--device cpu --tiny` shows that the benchmark itself works, and keeps nothing; `--layers` makes
the models shallow, and keeps nothing either.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import StaticCache

from benchmarks.common import RESULTS, machine, provenance, save, table
from benchmarks.contenders import MAKE, Shape, Work, contenders, measured, tokens

SHAPES = (
    Shape("1B", 2048, 8192, 16, 32, 8, 128256, batch=4, tokens=512, decoded=32),
    Shape("8B", 4096, 14336, 32, 32, 8, 128256, batch=2, tokens=1024, decoded=32),
)
TINY = (Shape("tiny", 32, 48, 1, 4, 2, 64, batch=2, tokens=8, decoded=3),)
GIB = 2**30


@dataclass(frozen=True)
class Task:
    """One work of some contenders. `goal` is the least speed of peftc, relative to `beside`."""

    work: str
    compiled: bool
    contenders: tuple[str, ...]
    beside: str
    goal: float
    adapters: str = "bfloat16"

    def __str__(self) -> str:
        dtype = "" if self.adapters == "bfloat16" else f", adapters in {self.adapters}"
        return f"{self.work}, {'compiled' if self.compiled else 'eager'}{dtype}"


TASKS = (
    Task("train", False, ("base", "peftc", "PEFT", "inlined"), "PEFT", 1.25),
    Task("train", False, ("peftc", "PEFT"), "PEFT", 1.25, adapters="float32"),
    Task("forward", True, ("merged", "peftc", "inlined"), "merged", 0.97),
    Task("decode", True, ("merged", "peftc", "inlined"), "merged", 0.97),
    Task("train", True, ("peftc", "PEFT"), "PEFT", 1.0),
)


def clock(device: str) -> Callable[[], float]:
    """Seconds, after the device has finished."""

    def read() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return read


def decode(model: nn.Module, shape: Shape, call: Callable[..., Any]) -> Work:
    """`decoded` tokens, one by one, behind a prompt in a static cache."""
    own: Any = model.eval()
    ids = tokens(model, shape, shape.tokens)
    cache = StaticCache(config=own.config, max_cache_len=shape.tokens + shape.decoded)
    with torch.no_grad():
        own(input_ids=ids, past_key_values=cache, use_cache=True)
    token = ids[:, :1].clone()
    lengths = [layer.cumulative_length for layer in cache.layers]

    def run() -> object:
        with torch.no_grad():
            for length in lengths:
                length.fill_(shape.tokens)
            for _ in range(shape.decoded):
                call(input_ids=token, past_key_values=cache, use_cache=True)
        return cache

    return run


def prepare(model: nn.Module, task: Task, shape: Shape, backend: str) -> Work:
    """The work of a model, after its first runs."""
    torch.compiler.reset()
    if task.work == "decode":
        mode = "reduce-overhead" if backend == "inductor" else None
        run = decode(model, shape, torch.compile(model, backend=backend, mode=mode))
    else:
        module: Any = torch.compile(model, backend=backend) if task.compiled else model
        run = MAKE[task.work](module, shape)
    for _ in range(3):
        run()
    return run


def memory(model: nn.Module, run: Work) -> float:
    """Bytes of a model, and of the most that a step allocates beside it."""
    own = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return sum(own.values()) + torch.cuda.max_memory_allocated() - before


def rows(shape: Shape, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The tasks of a shape."""
    base = shape.base(torch.bfloat16, options.device)
    tasks = [task for task in TASKS if task.work in options.work.split(",")]
    of_dtype = {dtype: contenders(base, dtype) for dtype in dict.fromkeys(task.adapters for task in tasks)}
    for models in [*of_dtype.values()][1:]:
        del models["merged"]  # one is enough
    for task in tasks:
        models = of_dtype[task.adapters]
        if task.compiled and options.eager:
            continue
        works: dict[str, Work] = {}
        for name in (name for name in task.contenders if name not in options.without.split(",")):
            start = time.perf_counter()
            works[name] = prepare(models[name], task, shape, options.backend)
            print(f"  {shape.name}, {task}, {name}: {time.perf_counter() - start:.0f} s to prepare", flush=True)
        seconds = measured(works, options.rounds, clock(options.device))
        peaks = {}
        if options.device == "cuda" and task.work == "train":
            peaks = {name: memory(models[name], works[name]) for name in works}
        yield {
            "shape": str(shape),
            "task": str(task),
            "beside": task.beside,
            "goal": task.goal,
            "speed": speed(seconds, task.beside),
            "seconds": {name: median(samples) for name, samples in seconds.items()},
            "bytes": peaks,
            **provenance(),
        }


def speed(seconds: dict[str, list[float]], beside: str) -> dict[str, float]:
    """How many times as fast as `beside` each contender is: the median over the rounds."""
    return {
        name: median(b / s for s, b in zip(samples, seconds[beside], strict=True)) for name, samples in seconds.items()
    }


def line(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    times = [f"{1e3 * row['seconds'][n]:.2f} ms" if n in row["seconds"] else "" for n in TIMES]
    peaks = [f"{row['bytes'][n] / GIB:.2f} GiB" if n in row["bytes"] else "" for n in ("peftc", "PEFT")]
    own, goal = row["speed"]["peftc"], row["goal"]
    result = f"{own:.3f} {'≥' if own >= goal else '<'} {goal}"
    return [row["shape"], row["task"], *times, f"× {row['beside']}", result, *peaks, row["date"], row["commit"]]


TIMES = ["base", "merged", "peftc", "PEFT", "inlined"]
HEAD = ["shape", "work", *TIMES, "speed", "peftc", "peak, peftc", "peak, PEFT", "date", "commit"]


def with_earlier(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results, and those of earlier runs for other work, in the order of shapes and tasks."""
    path = RESULTS / "gpu.json"
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    rows = {(row["shape"], row["task"]): row for row in [*earlier, *results]}
    order = [(str(shape), str(task)) for shape in SHAPES for task in TASKS]
    return [rows[key] for key in order if key in rows]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--layers", type=int, help="of each model, instead of its own number")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--work", default="forward,decode,train", help="which of forward, decode, train")
    parser.add_argument("--without", default="", help="contenders that are not measured")
    parser.add_argument("--eager", action="store_true", help="without what is compiled")
    parser.add_argument("--tiny", action="store_true", help="a model of one small layer")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: skipped")
        return 0
    results: list[dict[str, Any]] = []
    text = ""
    for shape in TINY if options.tiny else [s for s in SHAPES if s.name in options.shapes.split(",")]:
        own = dataclasses.replace(shape, layers=options.layers) if options.layers else shape
        for row in rows(own, options):
            results.append(row)
            is_saved = options.device == "cuda" and not options.tiny and not options.layers
            every = with_earlier(results) if is_saved else results
            text = f"LoRA (r=16) on all Linears, unmerged, bfloat16.\n\n{table(HEAD, [line(r) for r in every])}"
            print(" | ".join(line(row)), flush=True)
            if is_saved:
                save("gpu", {"rounds": options.rounds, "results": every}, text, machine("cuda"))
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
