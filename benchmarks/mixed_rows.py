"""What a batch of several tasks costs: LoRA on all Linears for each of 8 or 64 tasks, a task for
each of the batch's eight rows, beside the base, one task for all rows, and PEFT's `adapter_names`.

    python -m benchmarks.mixed_rows [--rounds 15] [--shapes token,small,wide]

On the CPU, in float32, on one thread. Contenders take turns in one process, and CPU time is
measured; printed are the medians of what they take divided by the base in the same round. `switch`
is what choosing a task and leaving it takes, for peftc and as `set_adapter` for PEFT. Exits with 1
where a forward of 64 tasks takes more than twice as long as the base.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import peftc
from benchmarks.common import ALPHA, MODULES, SITES, R, machine, save, table
from benchmarks.contenders import Shape, measured, tokens

ROWS = 8
SHAPES = (
    Shape("token", 256, 688, 4, 4, 4, 1000, batch=ROWS, tokens=1),
    Shape("small", 256, 688, 4, 4, 4, 1000, batch=ROWS, tokens=32),
    Shape("wide", 1024, 2816, 2, 16, 16, 1000, batch=ROWS, tokens=32),
)
COUNTS = (8, 64)  # tasks of the model
GOAL = 2.0  # times the base, with the most tasks
SPEC = f"peft 1\n\nedit all at {SITES} per task {{ h += lora(x, r={R}, alpha={ALPHA}) }}\n"
SWITCHES = 200


def names(count: int) -> list[str]:
    return [f"task{i}" for i in range(count)]


def tasks_of_rows(count: int) -> list[str]:
    """A task for each row: different ones, in no order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [f"task{order[row % count]}" for row in range(ROWS)]


def ours(base: nn.Module, count: int) -> nn.Module:
    model = peftc.compile(SPEC, copied(base), seed=0, tasks=names(count))
    with torch.no_grad():
        for name, parameter in peftc.parameters(model).items():
            if name.endswith(".B"):
                parameter.normal_(0, 0.01)
    return model.eval()


def theirs(base: nn.Module, count: int, values: dict[str, torch.Tensor]) -> Any:
    """PEFT's model with the same adapters."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=MODULES)
        first, *others = names(count)
        model: Any = get_peft_model(copied(base), config, adapter_name=first)  # pyright: ignore[reportArgumentType]
        for name in others:
            model.add_adapter(name, config)
    role = dict(zip(MODULES, ("attn.self.q", "attn.self.k", "attn.self.v", "attn.self.o"), strict=False))
    role |= {"gate_proj": "ffn.gate", "up_proj": "ffn.up", "down_proj": "ffn.down"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                path, _, end = name.partition(".lora_")
                matrix, task = end.split(".")[:2]
                layer, linear = path.split(".layers.")[1].split(".")[0], path.rpartition(".")[2]
                parameter.copy_(values[f"all/decoder.layer[{layer}].{role[linear]}/lora.tasks.{task}.{matrix}"])
    return model.eval()


def copied(base: nn.Module) -> nn.Module:
    """The base with the same weights."""
    return copy.deepcopy(base, {id(p): p for p in base.parameters()})


def works(shape: Shape) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """A forward of each contender, and microseconds of a switch."""
    base: Any = shape.base(torch.float32, "cpu").eval()
    ids = tokens(base, shape, shape.tokens)
    inputs = {"input_ids": ids, "use_cache": False}
    forwards: dict[str, Callable[[], Any]] = {"base": lambda: base(**inputs).logits}
    switches: dict[str, float] = {}
    for count in COUNTS:
        model = ours(base, count)
        other = theirs(base, count, dict(peftc.parameters(model).items()))
        rows = tasks_of_rows(count)

        def one(model: Any = model) -> Any:
            with peftc.task(model, "task1"):
                return model(**inputs).logits

        def mixed(model: Any = model, rows: list[str] = rows) -> Any:
            with peftc.task(model, task_ids=rows):
                return model(**inputs).logits

        def peft(model: Any = other, rows: list[str] = rows) -> Any:
            return model(**inputs, adapter_names=rows).logits

        forwards |= {f"peftc one of {count}": one, f"peftc {count}": mixed, f"PEFT {count}": peft}
        switches[f"peftc {count}"] = per_call(lambda model=model: leave(peftc.task(model, "task1")))
        switches[f"PEFT {count}"] = per_call(lambda other=other: other.set_adapter("task1"), 3)
        other.set_adapter("task0")
    return forwards, switches


def leave(block: Any) -> None:
    with block:
        pass


def per_call(run: Callable[[], object], calls: int = SWITCHES) -> float:
    """Microseconds of CPU time of a call, the median of five measurements."""
    samples: list[float] = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(calls):
            run()
        samples.append((time.process_time() - start) / calls)
    return 1e6 * median(samples)


@torch.no_grad()
def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    run, switches = works(shape)
    reference, others = run["peftc 64"](), run["PEFT 64"]()
    torch.testing.assert_close(reference, others, rtol=1e-3, atol=1e-4)  # the same function
    seconds = measured(run, rounds, time.process_time)
    ratios = {
        name: median(own / base for own, base in zip(samples, seconds["base"], strict=True))
        for name, samples in seconds.items()
    }
    base = 1e3 * median(seconds["base"])
    return {"shape": shape.name, "base_ms": base, "over_base": ratios, "switch_us": switches}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of the wide shape; four times as many of the others")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    chosen = [shape for shape in SHAPES if shape.name in options.shapes.split(",")]
    columns = [f"{kind} {count}" for count in COUNTS for kind in ("peftc one of", "peftc", "PEFT")]
    results = []
    lines: list[list[str]] = []
    for shape in chosen:
        results.append(measure(shape, options.rounds * (1 if shape.name == "wide" else 4)))
        over, switch = results[-1]["over_base"], results[-1]["switch_us"]
        lines.append(
            [
                str(shape),
                f"{results[-1]['base_ms']:.1f} ms",
                *(f"{over[name]:.2f}" for name in columns),
                *(f"{switch[f'{kind} {COUNTS[-1]}']:.0f} µs" for kind in ("peftc", "PEFT")),
            ]
        )
        print(" | ".join(lines[-1]), flush=True)
    heads = [f"{kind} {count} tasks" for count in COUNTS for kind in ("one of", "mixed,", "PEFT, mixed,")]
    head = ["LoRA (r=16) on all Linears", "base", *heads, "switch", "PEFT's switch"]
    text = f"Forwards of eight rows of different tasks, as multiples of the base.\n\n{table(head, lines)}"
    print(f"\n{text}")
    if not options.no_save:
        save("mixed_rows", {"rounds": options.rounds, "results": results}, text, machine())
    return int(any(result["over_base"][f"peftc {COUNTS[-1]}"] > GOAL for result in results))


if __name__ == "__main__":
    sys.exit(main())
