"""What compiling costs beside PEFT doing the same, and how it grows with depth, for LoRA on all
Linears of models of published shapes (`benchmarks/shapes.py`).

    python -m benchmarks.compile_time [--repeats 5]

Every measurement is a process of its own, in which nothing was compiled before; imports and the
making of the model are not measured. CPU time is, so that it matters less what else the machine
does: all of it is one thread of Python. Contenders take turns, two processes at a time, so that a
slow minute hits all of them; medians are printed. `later` is the median of compiling other models
of the type in the same process. The cache of analyses on disk is in an empty folder, but for
`cached`, where another process has filled it.

Exits with 1 where a ratio is over its goal, or one kind of layer is traced twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import ALPHA, R, machine, save, table
from benchmarks.shapes import COMPILED, DEEP, PLANNED, PLANNED_SPEC, Target

LATER = 3  # compilations after the first one in a process
DEPTHS = (12, 126)  # of LLaMA 405B
SHALLOW = 8  # layers of the models whose plans are compared
FIRST, CACHED, AGAIN = 1.0, 0.25, 0.25  # goals: peftc ÷ PEFT
FIRST_OF = {"LLaMA 70B": 0.5}
DEEPER, PLAN = 1.3, 1.5  # goals: deep ÷ shallow
KINDS = ("peftc", "PEFT", "cached", "plan")


@dataclass(frozen=True)
class Case:
    """One process: what is measured in it."""

    kind: str  # of KINDS
    shape: str
    layers: int = 0  # 0: those of the shape


def compile_peftc(model: nn.Module, target: Target) -> nn.Module:
    import peftc

    return peftc.compile(target.spec, model)


def compile_peft(model: nn.Module, target: Target) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    peft_model: Any = get_peft_model(
        model,  # pyright: ignore[reportArgumentType]
        LoraConfig(r=R, lora_alpha=ALPHA, target_modules=target.modules),
        low_cpu_mem_usage=True,
    )
    return peft_model


def counted_traces() -> Counter[str]:
    """Counts, from now on, the traces of each layer structure."""
    from peftc.observation.layer_keys import structure_key
    from peftc.tracing.tracer import RegionTracer

    traces: Counter[str] = Counter()
    trace = RegionTracer.trace_region

    def counting(self: RegionTracer, root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traces[structure_key(root)] += 1
        return trace(self, root, *args, **kwargs)

    RegionTracer.trace_region = counting  # type: ignore[method-assign]
    return traces


def measured(case: Case) -> dict[str, Any]:
    """In a fresh process: seconds of the first and of later runs, and the traces of the first."""
    for name in ("peft", "peftc.compiler"):
        import_module(name)
    torch.set_num_threads(1)  # idle threads would add CPU time
    traces = counted_traces()
    if case.kind == "plan":
        return {"first": timed_plan(case)}
    seconds: list[float] = []
    first: list[int] = []
    target = COMPILED.get(case.shape, DEEP)
    make = compile_peft if case.kind == "PEFT" else compile_peftc
    for _ in range(1 + LATER):
        model = target.skeleton(case.layers or None)
        gc.collect()
        start = time.process_time()
        compiled = make(model, target)
        seconds.append(time.process_time() - start)
        first = first or list(traces.values())
        assert all(p.is_meta for p in compiled.parameters())
    return {"first": seconds[0], "later": median(seconds[1:]), "traces": first}


def timed_plan(case: Case) -> float:
    import peftc

    config = PLANNED[case.shape](case.layers or None)
    start = time.process_time()
    peftc.plan(PLANNED_SPEC, config)
    return time.process_time() - start


def in_process(case: Case, cached: str) -> dict[str, Any]:
    """Runs one case in a process with a cache of its own, or with the one in folder `cached`."""
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", case.kind, case.shape, str(case.layers)]
    with tempfile.TemporaryDirectory() as empty:
        folder = cached if case.kind == "cached" else empty
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(run.stdout)


def cases() -> list[Case]:
    compiled = [Case(kind, shape) for shape in COMPILED for kind in ("peftc", "PEFT", "cached")]
    deep = [Case("peftc", "LLaMA 405B", layers) for layers in DEPTHS]
    planned = [Case("plan", shape, layers) for shape in PLANNED for layers in (SHALLOW, 0)]
    return [*compiled, *deep, *planned]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "SHAPE", "LAYERS"), help="measure once, print JSON")
    options = parser.parse_args()
    if options.one:
        kind, shape, layers = options.one
        print(json.dumps(measured(Case(kind, shape, int(layers)))))
        return 0
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(2) as pool:
        fill = [Case("cached", shape) for shape in COMPILED]
        list(pool.map(lambda case: in_process(case, cache), fill))
        turns = [case for _ in range(options.repeats) for case in cases()]
        results = list(pool.map(lambda case: in_process(case, cache), turns))
    runs: dict[Case, list[dict[str, Any]]] = {}
    for case, result in zip(turns, results, strict=True):
        runs.setdefault(case, []).append(result)
    return report(runs, options.repeats)


def report(runs: dict[Case, list[dict[str, Any]]], repeats: int) -> int:
    """Prints and saves the medians. Returns 1 if a ratio is over its goal."""
    seconds = {case: median(run["first"] for run in rows) for case, rows in runs.items()}
    later = {case: median(run["later"] for run in rows) for case, rows in runs.items() if "later" in rows[0]}
    traces = max(count for rows in runs.values() for run in rows for count in run.get("traces", ()))
    compiled, beside_peft = beside(seconds, later)
    deeper, growth = depths(seconds)
    goals = [*compiled, *deeper]
    text = "\n\n".join(
        [
            f"Compiling LoRA (r={R}) on all Linears, on meta; CPU seconds, medians of {repeats} processes, and their\n"
            "ratios to PEFT's with the goals.",
            beside_peft,
            "More layers: CPU seconds, and their ratio with the goal.",
            growth,
            f"Most traces of one kind of layer: {traces}. Goals reached: {sum(map(reached, goals))} of {len(goals)}.",
        ]
    )
    print(text)
    rows = [
        {"kind": case.kind, "shape": case.shape, "layers": case.layers, "first": value, "later": later.get(case)}
        for case, value in seconds.items()
    ]
    save("compile_time", {"repeats": repeats, "seconds": rows, "most_traces": traces}, text, machine())
    return int(traces > 1 or not all(map(reached, goals)))


Goal = tuple[float, float]  # a ratio, and the most that it should be


def reached(goal: Goal) -> bool:
    return goal[0] <= goal[1]


def beside(seconds: dict[Case, float], later: dict[Case, float]) -> tuple[list[Goal], str]:
    """peftc ÷ PEFT: the ratios with their goals, and a table."""
    goals: list[Goal] = []
    rows: list[list[str]] = []
    for shape in COMPILED:
        peftc, peft, cached = (Case(kind, shape) for kind in ("peftc", "PEFT", "cached"))
        own = [
            (seconds[peftc] / seconds[peft], FIRST_OF.get(shape, FIRST)),
            (seconds[cached] / seconds[peft], CACHED),
            (later[peftc] / later[peft], AGAIN),
        ]
        goals += own
        cells = (seconds[peft], seconds[peftc], seconds[cached], later[peft], later[peftc])
        rows.append([shape, *(f"{value:.3f}" for value in cells), *map(ratio, own)])
    head = ["", "PEFT first", "peftc first", "cached", "PEFT later", "peftc later", "first", "cached", "later"]
    return goals, table(head, rows)


def depths(seconds: dict[Case, float]) -> tuple[list[Goal], str]:
    """Deep ÷ shallow: the ratios with their goals, and a table."""
    shallow, deep = (Case("peftc", "LLaMA 405B", layers) for layers in DEPTHS)
    pairs = [(f"compile LLaMA 405B, {DEPTHS[1]} : {DEPTHS[0]} layers", shallow, deep, DEEPER)]
    pairs += [
        (f"plan {shape}, 61 : {SHALLOW} layers", Case("plan", shape, 8), Case("plan", shape), PLAN) for shape in PLANNED
    ]
    goals: list[Goal] = [(seconds[b] / seconds[a], most) for _, a, b, most in pairs]
    lines: Iterable[tuple[tuple[str, Case, Case, float], Goal]] = zip(pairs, goals, strict=True)
    rows = [[name, f"{seconds[a]:.3f}", f"{seconds[b]:.3f}", ratio(goal)] for (name, a, b, _), goal in lines]
    return goals, table(["", "shallow", "deep", "ratio"], rows)


def ratio(goal: Goal) -> str:
    value, most = goal
    return f"{value:.2f} {'≤' if value <= most else '>'} {most:g}"


if __name__ == "__main__":
    sys.exit(main())
