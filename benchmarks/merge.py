"""What merging an adapter into a checkpoint on disk costs: LoRA on the queries and values, or on
all Linears, of a LLaMA in bf16 in several files.

    python -m benchmarks.merge [--gigabytes 4] [--rounds 3] [--folder DIR]

Contenders: `peftc merge`; PEFT, which loads model and adapter, merges and saves; twenty lines that
go through the files (`stream`); and `cp` with an fsync of each file, the least that a copy costs.
Each runs in a process of its own, from the same files to new ones on the same disk; contenders take
turns. Printed are medians of wall time and CPU time, imports aside, of the peak memory of the
process, libraries included, and of the time of `cp` divided by that of the contender. The results
of all three have to be equal bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.common import MODULES, R, llama, machine, save, table

WORK = {
    "q, v": ("attn.q", "attn.v"),
    "all Linears": ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down"),
}
ALPHA, SHARD = 32, 5e8
CONTENDERS = ("peftc", "PEFT", "stream", "cp")


def write_base(folder: Path, gigabytes: float) -> None:
    """A LLaMA of about this size, with random weights: an eighth is embeddings."""
    from transformers import LlamaForCausalLM

    hidden, ffn = (2048, 5632) if gigabytes >= 1 else (512, 1408)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * ffn)
    layers = max(1, round(gigabytes * 1e9 / layer * 7 / 8))
    config = llama(hidden, ffn, layers, 16, 16, max(64, int(gigabytes * 1e9 / 8 / hidden / 4)))
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator, shards, size = torch.Generator().manual_seed(0), list[dict[str, Any]]([{}]), 0
    for name, shape in shapes.items():
        if size and size + 2 * shape.numel() > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * shape.numel()
    files = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
    for file, shard in files.items():
        values = {
            n: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator) for n, s in shard.items()
        }
        save_file(values, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, shard in files.items() for name in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_adapters(folder: Path, base: Path, roles: tuple[str, ...]) -> None:
    """The same adapter in the formats of peftc and PEFT."""
    import peftc
    from peftc.installation.record import installation_of
    from peftc.merging.base_model import open_base

    model = open_base(base).model
    sites = " | ".join(f"layer[*].{role}" for role in roles)
    peftc.compile(f"peft 1\nedit a at {sites} {{ h += lora(x, r={R}, alpha={ALPHA}) }}\n", model, seed=0)
    parameters = peftc.parameters(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.data.normal_(0, 0.02, generator=generator)
    peftc.save(model, folder / "peftc")
    tensors = dict[str, torch.Tensor]()
    for site in (site_edit.site for site_edit in installation_of(model).site_edits):
        for own, other in (("A", "lora_A"), ("B", "lora_B")):
            value = parameters[f"a/{site.path}/lora.{own}"].detach().clone()
            tensors[f"base_model.model.{site.module}.{other}.weight"] = value
    modules = sorted({name.split(".")[-3] for name in tensors})
    assert set(modules) <= set(MODULES)
    config = {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "target_modules": modules, "task_type": "CAUSAL_LM"}
    (folder / "PEFT").mkdir()
    save_file(tensors, folder / "PEFT" / "adapter_model.safetensors")
    (folder / "PEFT" / "adapter_config.json").write_text(json.dumps(config))


def run_peftc(base: Path, adapters: Path, out: Path) -> None:
    import peftc

    peftc.merge(base, adapters / "peftc", out)


def run_peft(base: Path, adapters: Path, out: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = PeftModel.from_pretrained(model, str(adapters / "PEFT"), autocast_adapter_dtype=True).merge_and_unload()
    model.save_pretrained(out, max_shard_size=f"{SHARD / 1e6:.0f}MB")
    flush(out)


def run_stream(base: Path, adapters: Path, out: Path) -> None:
    lora = load_file(adapters / "PEFT" / "adapter_model.safetensors")
    out.mkdir()
    for file in sorted(base.iterdir()):
        if file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
            continue
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        for key, tensor in tensors.items():
            name = f"base_model.model.{key.removesuffix('.weight')}"
            if f"{name}.lora_A.weight" in lora:
                delta = lora[f"{name}.lora_B.weight"] * (ALPHA / R) @ lora[f"{name}.lora_A.weight"]
                tensors[key] = (tensor.float() + delta).to(tensor.dtype)
        save_file(tensors, out / file.name, {"format": "pt"})
    flush(out)


def run_cp(base: Path, adapters: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", "--reflink=never", str(base), str(out)], check=True)
    flush(out)


def flush(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)


RUN: dict[str, Callable[[Path, Path, Path], None]] = {
    "peftc": run_peftc,
    "PEFT": run_peft,
    "stream": run_stream,
    "cp": run_cp,
}


def measured(name: str, base: Path, adapters: Path, out: Path) -> dict[str, float]:
    """Wall seconds, CPU seconds and peak bytes of a process."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    command = [sys.executable, "-m", "benchmarks.merge", "--run", name, "--folder", *map(str, (base, adapters, out))]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


def run(name: str, base: Path, adapters: Path, out: Path) -> dict[str, float]:
    """In a fresh process."""
    for module in {"peftc": ("peftc.merging",), "PEFT": ("peft",)}.get(name, ()):
        import_module(module)
    start, cpu = time.perf_counter(), cpu_seconds()
    RUN[name](base, adapters, out)
    seconds = {"wall": time.perf_counter() - start, "cpu": cpu_seconds() - cpu}
    return seconds | {"peak": peak_memory()}


def peak_memory() -> int:
    """In bytes. `ru_maxrss` would be that of the parent process, if it had more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def cpu_seconds() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, who))


def same(one: Path, other: Path) -> bool:
    tensors = [{k: f for f in sorted(p.glob("*.safetensors")) for k in keys_of(f)} for p in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(value(tensors[0][key], key), value(tensors[1][key], key)) for key in tensors[0]
    )


def keys_of(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def value(file: Path, key: str) -> torch.Tensor:
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(key)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--disk", type=Path, help="where files are written; by default the temporary folder")
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)  # what a process does
    parser.add_argument("--folder", type=Path, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.run is not None:
        print(json.dumps(run(options.run, *options.folder)))
        return 0
    names = options.contenders.split(",")
    results = dict[str, Any]()
    with TemporaryDirectory(dir=options.disk) as folder:
        root = Path(folder)
        write_base(root / "base", options.gigabytes)
        for work, roles in WORK.items():
            adapters = root / work
            adapters.mkdir()
            write_adapters(adapters, root / "base", roles)
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            for _ in range(options.rounds):
                for name in names:
                    runs[name].append(measured(name, root / "base", adapters, root / f"out {name}"))
            results[work] = {n: {k: median(run[k] for run in own) for k in own[0]} for n, own in runs.items()}
            for name in names:
                ratio = [a["wall"] / b["wall"] for a, b in zip(runs.get("cp", runs[name]), runs[name], strict=True)]
                results[work][name]["throughput"] = median(ratio)
            outs = [root / f"out {name}" for name in names if name != "cp"]
            results[work]["equal"] = all(same(outs[0], out) for out in outs[1:])
    rows = [
        [
            f"{work}: {n}",
            f"{o['wall']:.1f} s",
            f"{o['cpu']:.1f} s",
            f"{o['peak'] / 1e9:.2f} GB",
            f"{o['throughput']:.2f}",
        ]
        for work, own in results.items()
        for n, o in own.items()
        if n != "equal"
    ]
    text = table(["merge", "time", "CPU", "peak memory", "speed, times `cp`"], rows)
    text += "\n\nAll results are equal." if all(own["equal"] for own in results.values()) else "\n\nRESULTS DIFFER"
    print(text)
    if not options.no_save:
        save("merge", {"gigabytes": options.gigabytes, **results}, text, machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
