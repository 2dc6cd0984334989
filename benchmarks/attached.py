"""What adapters that were trained apart cost on one model: 64 attached ones (`peftc.attach`), LoRA
on all Linears, and a store of 1,000 (`peftc.AdapterStore`), beside PEFT.

    python -m benchmarks.attached [--rounds 15] [--shapes token,small,wide] [--adapters 1000]

On the CPU, in float32, on one thread. Contenders take turns in one process, and CPU time is
measured; printed are the medians of what they take divided by the base in the same round. *One* is
a forward with one active adapter, *mixed* one of eight rows with different adapters. A *switch* is
`peftc.activate`, or `set_adapter` of PEFT; a *swap* is `peftc.swap`, or `hotswap_adapter` of PEFT.
A *hit* is a store's choice of an adapter on the model, a *miss* of one that is on disk; for PEFT
that is `load_adapter` with `delete_adapter` of the one used longest ago.

Exits with 1 where mixed rows take more than twice as long as the base, a switch more than 0.1 ms, a
swap or another batch is compiled again, or a store uses more memory than what it has attached.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import peftc
from benchmarks.common import SPEC, R, machine, save, table
from benchmarks.contenders import Shape, measured, tokens
from benchmarks.mixed_rows import SHAPES, copied, names, per_call, tasks_of_rows, theirs

COUNT = 64  # attached adapters
MIXED_GOAL, SWITCH_GOAL = 2.0, 100.0  # times the base; microseconds
STORE_SPEC = f"peft 1\n\nedit qv at layer[*].attn.q | layer[*].attn.v {{ h += lora(x, r={R}) }}\n"
MISSES = 20  # of PEFT


def save_adapters(base: nn.Module, spec: str, folder: Path, count: int) -> None:
    """Adapters with random values, one in each sub-folder."""
    model = peftc.compile(spec, copied(base), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in names(count):
            for parameter in peftc.parameters(model).values():
                parameter.normal_(0, 0.01, generator=generator)
            peftc.save(model, folder / name)


def attached_models(base: nn.Module, folder: Path) -> tuple[Any, Any]:
    """The base with the adapters of a folder: attached by peftc, and those of PEFT."""
    model: Any = copied(base)
    for name in names(COUNT):
        peftc.attach(folder / name, model)
    values: dict[str, torch.Tensor] = {
        key.replace("/lora.", f"/lora.tasks.{name}."): parameter
        for name in names(COUNT)
        for key, parameter in peftc.parameters(model, name).items()
    }
    return model.eval(), theirs(base, COUNT, values)


def save_of_peft(model: Any, folder: Path) -> dict[str, Path]:
    """The folders of two adapters."""
    model.save_pretrained(folder, selected_adapters=["task1", "task2"])
    return {name: folder / name for name in ("task1", "task2")}


def swaps_of(model: Any, other: Any, folder: Path, peft: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """A swap of peftc and one of PEFT: at each call the other one of two adapters."""
    from peft.utils.hotswap import hotswap_adapter

    turns, other_turns = itertools.cycle(("task2", "task1")), itertools.cycle(("task2", "task1"))
    of_peft = save_of_peft(other, peft)

    def swap() -> None:
        peftc.swap(model, "task1", folder / next(turns))

    def hotswap() -> None:
        hotswap_adapter(other, str(of_peft[next(other_turns)]), adapter_name="task1", torch_device="cpu")

    return swap, hotswap


def recompilations(model: Any, inputs: dict[str, Any], changes: list[Callable[[], object]], call: Any = None) -> int:
    """How many graphs are compiled for calls after changes, behind a first call."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled: Any = torch.compile(model, backend=counter)
    run = call or (lambda compiled, _: compiled(**inputs))
    run(compiled, 0)
    first = counter.frame_count
    for number, change in enumerate(changes):
        change()
        run(compiled, number + 1)
    torch.compiler.reset()
    return counter.frame_count - first


def mixed_call(model: Any, inputs: dict[str, Any]) -> Callable[[Any, int], object]:
    """A call of a compiled model with other adapters in the rows each time."""
    rows = tasks_of_rows(COUNT)

    def call(compiled: Any, number: int) -> object:
        with peftc.adapter(model, rows=[f"task{(int(name[4:]) + number) % COUNT}" for name in rows]):
            return compiled(**inputs)

    return call


def measure(shape: Shape, rounds: int, folder: Path) -> dict[str, Any]:
    base: Any = shape.base(torch.float32, "cpu").eval()
    inputs = {"input_ids": tokens(base, shape, shape.tokens), "use_cache": False}
    save_adapters(base, SPEC, folder / "peftc", COUNT)
    model, other = attached_models(base, folder / "peftc")
    rows = tasks_of_rows(COUNT)
    peftc.activate(model, "task1")
    other.set_adapter("task1")

    def mixed() -> Any:
        with peftc.adapter(model, rows=rows):
            return model(**inputs).logits

    forwards: dict[str, Callable[[], Any]] = {
        "base": lambda: base(**inputs).logits,
        "peftc one": lambda: model(**inputs).logits,
        "PEFT one": lambda: other(**inputs).logits,
        "peftc mixed": mixed,
        "PEFT mixed": lambda: other(**inputs, adapter_names=rows).logits,
    }
    for kind in ("one", "mixed"):  # the same function
        torch.testing.assert_close(forwards[f"peftc {kind}"](), forwards[f"PEFT {kind}"](), rtol=1e-3, atol=1e-4)
    seconds = measured(forwards, rounds, time.process_time)
    over = {
        name: median(own / first for own, first in zip(samples, seconds["base"], strict=True))
        for name, samples in seconds.items()
    }
    ours, peft = itertools.cycle(("task2", "task1")), itertools.cycle(("task2", "task1"))
    swap, hotswap = swaps_of(model, other, folder / "peftc", folder / "PEFT")
    changes = {
        "switch": {
            "peftc": per_call(lambda: peftc.activate(model, next(ours))),
            "PEFT": per_call(lambda: other.set_adapter(next(peft)), 3),
        },
        "swap": {"peftc": per_call(swap, 2), "PEFT": per_call(hotswap, 2)},
    }
    peftc.activate(model, "task1")
    other.set_adapter("task1")
    compiled = {
        "peftc, swaps": recompilations(model, inputs, [swap] * 4),
        "PEFT, swaps": recompilations(other, inputs, [hotswap] * 4),
        "peftc, mixed": recompilations(model, inputs, [lambda: None] * 4, mixed_call(model, inputs)),
    }
    base_ms = 1e3 * median(seconds["base"])
    return {"shape": shape.name, "base_ms": base_ms, "over_base": over, "us": changes, "recompilations": compiled}


def resident() -> float:
    """The resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def measure_store(shape: Shape, count: int, folder: Path) -> dict[str, Any]:
    """A store of many adapters: the memory after all have been chosen, and the time of a choice."""
    base: Any = shape.base(torch.float32, "cpu").eval()
    save_adapters(base, STORE_SPEC, folder / "store", count)
    size = sum(file.stat().st_size for file in (folder / "store" / "task0").iterdir()) / 2**20
    model = copied(base)
    store = peftc.AdapterStore(model, folder / "store")
    chosen = names(count)
    for name in chosen[: 4 * store.capacity]:
        store.activate(name)
    before, start = resident(), time.process_time()
    for name in chosen[4 * store.capacity :]:
        store.activate(name)
    miss = (time.process_time() - start) / (count - 4 * store.capacity)
    growth = resident() - before
    last = itertools.cycle(store.resident)
    hit = per_call(lambda: store.activate(next(last)))
    return {
        "adapters": count,
        "capacity": store.capacity,
        "mib_of_one": size,
        "growth_mib": growth,
        "hit_us": hit,
        "miss_ms": 1e3 * miss,
        "peft_miss_ms": 1e3 * peft_miss(base, store.capacity, folder / "PEFT store"),
    }


def peft_miss(base: nn.Module, capacity: int, folder: Path) -> float:
    """Seconds in which PEFT reads an adapter from disk, uses it, and deletes another one."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=R, target_modules=["q_proj", "v_proj"])
        model: Any = get_peft_model(copied(base), config, adapter_name="old0")  # pyright: ignore[reportArgumentType]
        for number in range(1, capacity):
            model.add_adapter(f"old{number}", config)
        model.save_pretrained(folder, selected_adapters=["old0"])
        start = time.process_time()
        for number in range(MISSES):
            model.load_adapter(str(folder / "old0"), f"old{number + capacity}")
            model.set_adapter(f"old{number + capacity}")
            model.delete_adapter(f"old{number}")
        return (time.process_time() - start) / MISSES


def texts(results: list[dict[str, Any]], shapes: list[Shape], store: dict[str, Any]) -> str:
    kinds = ("peftc one", "PEFT one", "peftc mixed", "PEFT mixed")
    head = ["LoRA (r=16) on all Linears", "base", "one of 64", "PEFT's", "mixed rows", "PEFT's"]
    head += ["switch", "PEFT's", "swap", "PEFT's", "recompiled by swaps", "by other rows"]
    lines = [
        [
            str(shape),
            f"{one['base_ms']:.1f} ms",
            *(f"{one['over_base'][kind]:.2f}" for kind in kinds),
            *(f"{one['us']['switch'][who]:.0f} µs" for who in ("peftc", "PEFT")),
            *(f"{one['us']['swap'][who] / 1e3:.1f} ms" for who in ("peftc", "PEFT")),
            *(str(one["recompilations"][f"peftc, {what}"]) for what in ("swaps", "mixed")),
        ]
        for shape, one in zip(shapes, results, strict=True)
    ]
    first = f"64 attached adapters: forwards as multiples of the base, and changes.\n\n{table(head, lines)}"
    head = ["LoRA (r=16) on queries and values", "on the model", "one", "memory grows by", "hit", "miss", "PEFT's"]
    line = [
        f"{store['adapters']:,} adapters",
        str(store["capacity"]),
        f"{store['mib_of_one']:.2f} MiB",
        f"{store['growth_mib']:.1f} MiB",
        f"{store['hit_us']:.0f} µs",
        f"{store['miss_ms']:.1f} ms",
        f"{store['peft_miss_ms']:.1f} ms",
    ]
    return f"{first}\n\nA store on disk, after all of its adapters have been chosen.\n\n{table(head, [line])}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of the wide shape; four times as many of the others")
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--adapters", type=int, default=1000, help="of the store, more than 32")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    shapes = [shape for shape in SHAPES if shape.name in options.shapes.split(",")]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():  # first: later there is more memory to reuse
        store = measure_store(SHAPES[1], options.adapters, Path(folder))
    print(store, flush=True)
    for shape in shapes:
        rounds = options.rounds * (1 if shape.name == "wide" else 4)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            results.append(measure(shape, rounds, Path(folder)))
        print(results[-1], flush=True)
    text = texts(results, shapes, store)
    print(f"\n{text}")
    if not options.no_save:
        save("attached", {"rounds": options.rounds, "results": results, "store": store}, text, machine())
    is_slow = any(
        one["over_base"]["peftc mixed"] > MIXED_GOAL or one["us"]["switch"]["peftc"] > SWITCH_GOAL for one in results
    )
    is_compiled = any(one["recompilations"][f"peftc, {what}"] for one in results for what in ("swaps", "mixed"))
    is_large = store["growth_mib"] > (store["capacity"] + 1) * store["mib_of_one"]
    return int(is_slow or is_compiled or is_large)


if __name__ == "__main__":
    sys.exit(main())
