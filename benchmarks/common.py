"""Shared by the benchmarks of compiled models: the edit, the machine, and the files of results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig

RESULTS = Path(__file__).resolve().parent / "results"
R, ALPHA = 16, 32
ROLES = ("attn.q", "attn.k", "attn.v", "attn.o", "ffn.gate", "ffn.up", "ffn.down")
MODULES = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
]  # the same Linears by PEFT's names
SITES = " | ".join(f"layer[*].{role}" for role in ROLES)
SPEC = f"peft 1\n\nedit all at {SITES} {{ h += lora(x, r={R}, alpha={ALPHA}) }}\n"


def llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> LlamaConfig:
    """A LLaMA of this shape."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


def commit() -> str:
    """The commit of the checkout, with `+` if files differ from it."""
    root = Path(__file__).resolve().parent.parent
    try:
        command = ["git", "describe", "--always", "--dirty=+"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine(device: str = "cpu") -> dict[str, Any]:
    """Where, when and with what a benchmark ran."""
    gpu = {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if device == "cuda" else {}
    packages = {name: version(name) for name in ("torch", "transformers", "peft", "peftc")}
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        **gpu,
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **packages,
    }


def provenance() -> dict[str, str]:
    """The date of a benchmark and its commit, with `+` if files differ from it."""
    root = RESULTS.parent.parent
    commands = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "peftc"]]
    commit, status = (
        subprocess.run(["git", *a], cwd=root, capture_output=True, text=True).stdout.strip() for a in commands
    )
    return {"date": date.today().isoformat(), "commit": commit + ("+" if status else "")}


def processor() -> str:
    """The name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def save(name: str, results: dict[str, Any], text: str, on: dict[str, Any]) -> None:
    """Writes `results/<name>.json` and `.md`, both with the machine."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": on, **results}, indent=1) + "\n")
    machine = ", ".join(f"{key} {value}" for key, value in on.items())
    (RESULTS / f"{name}.md").write_text(f"{text}\n\nOn: {machine}.\n")


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
