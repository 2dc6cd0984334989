"""What compiling costs: LoRA on all Linears of a skeleton of LLaMA 70B, beside PEFT doing the same.

    python -m benchmarks.compile_time [--repeats 5]

Every measurement is a process of its own, in which nothing was compiled before; imports and the
making of the skeleton are not measured. CPU time is, so that it matters less what else the machine
does: all of it is one thread of Python. Contenders take turns, so that a slow minute hits all of
them; medians are printed, and beside them the median of later compilations in the same processes.
Exits with 1 where 80 layers take peftc more than a second, or more than twice as long as 8 layers,
or where one kind of layer is traced twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.common import ALPHA, MODULES, SPEC, R, llama, machine, save, table

LAYERS = (8, 80)
LATER = 3  # compilations after the first one in a process
SECONDS, GROWTH = 1.0, 2.0


def skeleton(layers: int) -> nn.Module:
    """LLaMA 70B at some depth, on the meta device: no memory for weights."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(llama(8192, 28672, layers, 64, 8, 32000))


def compile_peftc(model: nn.Module) -> nn.Module:
    import peftc

    return peftc.compile(SPEC, model)


def compile_peft(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    peft_model: Any = get_peft_model(
        model,  # pyright: ignore[reportArgumentType]
        LoraConfig(r=R, lora_alpha=ALPHA, target_modules=MODULES),
        low_cpu_mem_usage=True,
    )
    return peft_model


CONTENDERS = {"peftc": compile_peftc, "PEFT": compile_peft}


def counted_traces() -> Counter[str]:
    """Counts, from now on, the traces of each layer structure."""
    from peftc.observation.sample_forward import structure_key
    from peftc.tracing.tracer import RegionTracer

    traces: Counter[str] = Counter()
    trace = RegionTracer.trace_region

    def counting(self: RegionTracer, root: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traces[structure_key(root)] += 1
        return trace(self, root, *args, **kwargs)

    RegionTracer.trace_region = counting  # type: ignore[method-assign]
    return traces


def measured(contender: str, layers: int) -> dict[str, Any]:
    """In a fresh process: seconds of the first and of later compilations, and the traces of the
    first.
    """
    import peft  # noqa: F401

    import peftc.compiler  # noqa: F401

    torch.set_num_threads(1)  # idle threads would add CPU time
    traces = counted_traces()
    seconds: list[float] = []
    first: list[int] = []
    for _ in range(1 + LATER):
        model = skeleton(layers)
        gc.collect()
        start = time.process_time()
        compiled = CONTENDERS[contender](model)
        seconds.append(time.process_time() - start)
        first = first or list(traces.values())
        assert all(p.is_meta for p in compiled.parameters())
    return {"first": seconds[0], "later": median(seconds[1:]), "traces": first}


def in_process(contender: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_time", "--one", contender, str(layers)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("CONTENDER", "LAYERS"), help="measure once, print JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one[0], int(options.one[1]))))
        return 0
    cases = [(contender, layers) for layers in LAYERS for contender in CONTENDERS]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(options.repeats):
        for case in cases:
            runs[case].append(in_process(*case))
    return report(runs, options.repeats)


def report(runs: dict[tuple[str, int], list[dict[str, Any]]], repeats: int) -> int:
    """Prints and saves the medians. Returns 1 if a limit is exceeded."""
    first = {case: median(r["first"] for r in rows) for case, rows in runs.items()}
    later = {case: median(r["later"] for r in rows) for case, rows in runs.items()}
    rows = [
        [
            contender,
            *(f"{when[contender, n]:.2f} s" for when in (first, later) for n in LAYERS),
            *growth(contender, first),
        ]
        for contender in CONTENDERS
    ]
    shallow, deep = LAYERS
    head = ["", *(f"{when}, {n} layers" for when in ("first", "later") for n in LAYERS), f"first, {deep} : {shallow}"]
    ratio = first["peftc", deep] / first["PEFT", deep]
    traces = [count for rows in runs.values() for r in rows for count in r["traces"]]
    text = "\n\n".join(
        [
            f"Compiling LoRA (r={R}) on all Linears of LLaMA 70B's shape, on meta; medians of {repeats} processes.",
            table(head, rows),
            f"peftc : PEFT at {deep} layers {ratio:.2f}; most traces of one kind of layer: {max(traces)}",
        ]
    )
    print(text)
    seconds = {
        f"{contender} {n}": {"first": first[contender, n], "later": later[contender, n]} for contender, n in runs
    }
    save("compile_time", {"repeats": repeats, "seconds": seconds, "most_traces": max(traces)}, text, machine())
    depth_ratio = first["peftc", deep] / first["peftc", shallow]
    return int(first["peftc", deep] > SECONDS or depth_ratio > GROWTH or max(traces) > 1)


def growth(contender: str, seconds: dict[tuple[str, int], float]) -> list[str]:
    return [f"{seconds[contender, LAYERS[1]] / seconds[contender, LAYERS[0]]:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
