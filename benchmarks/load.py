"""What loading a saved adapter costs: LoRA on all Linears of a LLaMA (d 1024, 2 layers), beside
PEFT's `PeftModel.from_pretrained` of the same adapter.

    python -m benchmarks.load [--processes 5] [--later 5]

Both read their own files onto a base in memory and return a model that computes: that is what a
user calls, and in both it covers the edit of the model, the reading and the checks (peftc also
compares the base's weights and the files' hashes with what was saved). Making the base and imports
are not measured. CPU time is. Each process belongs to one of the two, so that both pay for what
the first load of a process does in torch. It loads an adapter once, and then onto further models of
the type. Contenders take turns; a process of peftc with an empty cache is followed by one with what
that has kept. Printed are medians, and the medians of the ratios of processes side by side.
Exits with 1 where a cached or a later load takes peftc longer than PEFT.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.common import ALPHA, MODULES, SPEC, R, llama, machine, save, table

GOAL = 1.0  # times PEFT
Load = Callable[[nn.Module], object]


def base() -> nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(llama(1024, 2816, 2, 16, 16, 1000)).eval()


def save_both(folder: Path) -> None:
    """An adapter of each library."""
    from peft import LoraConfig, get_peft_model

    import peftc

    peftc.save(peftc.compile(SPEC, base(), seed=0), folder / "peftc")
    model: Any = base()
    get_peft_model(model, LoraConfig(r=R, lora_alpha=ALPHA, target_modules=MODULES)).save_pretrained(folder / "PEFT")


def loads(folder: Path) -> dict[str, Load]:
    from peft import PeftModel

    from peftc import load

    return {
        "peftc": lambda model: load(folder / "peftc", model),
        "PEFT": lambda model: PeftModel.from_pretrained(model, folder / "PEFT"),  # pyright: ignore[reportArgumentType]
    }


def timed(load: Load) -> float:
    """Seconds of CPU time."""
    model = base()
    gc.collect()
    start = time.process_time()
    load(model)
    return time.process_time() - start


def measured(name: str, folder: Path, later: int) -> list[float]:
    """In a fresh process: seconds of the first load by one library, and of later ones."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load = loads(folder)[name]
    return [timed(load) for _ in range(1 + later)]


def in_process(name: str, folder: str, later: int, cache: str) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.load", "--one", name, folder, "--later", str(later)]
    environment = {**os.environ, "PEFTC_CACHE": str(Path(folder) / cache)}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--later", type=int, default=5, help="loads in a process after the first")
    parser.add_argument("--one", nargs=2, metavar=("LIBRARY", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    if options.one is not None:
        name, folder = options.one
        print(json.dumps(measured(name, Path(folder), options.later)))
        return 0
    torch.set_num_threads(1)  # as each process does
    runs: dict[str, list[list[float]]] = {"peftc": [], "peftc, cached": [], "PEFT": []}
    with TemporaryDirectory() as folder:
        save_both(Path(folder))
        for i in range(options.processes):
            for name, seconds in runs.items():
                seconds.append(in_process(name.partition(",")[0], folder, options.later, f"cache {i}"))
    first = {name: [seconds[0] for seconds in rows] for name, rows in runs.items()}
    again = {name: [median(seconds[1:]) for seconds in rows] for name, rows in runs.items()}
    rows = {
        "first": (first["peftc"], first["PEFT"]),
        "first, cached": (first["peftc, cached"], first["PEFT"]),
        "later": (again["peftc"], again["PEFT"]),
    }
    results = {
        when: {
            "peftc": median(own),
            "PEFT": median(others),
            "ratio": median(a / b for a, b in zip(own, others, strict=True)),
        }
        for when, (own, others) in rows.items()
    }
    lines = [
        [when, f"{1e3 * one['peftc']:.0f} ms", f"{1e3 * one['PEFT']:.0f} ms", f"{one['ratio']:.2f}"]
        for when, one in results.items()
    ]
    head = ["load in a process", "peftc", "PEFT", "peftc ÷ PEFT"]
    text = f"Loading LoRA (r={R}) on all Linears of a LLaMA with d 1024 and 2 layers.\n\n{table(head, lines)}"
    print(text)
    if not options.no_save:
        save("load", {"processes": options.processes, "later": options.later, "seconds": results}, text, machine())
    return int(any(results[when]["ratio"] > GOAL for when in ("first, cached", "later")))


if __name__ == "__main__":
    sys.exit(main())
