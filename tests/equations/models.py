"""Models of the zoo with forms of `papers.peft`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from peftc.installation.record import is_installed
from tests import zoo

PAPERS = (Path(__file__).parent / "papers.peft").read_text(encoding="utf-8")
EQUATIONS = {  # at which sites, the equation with `NAME` before its forms; and whether it folds
    "lora": ("layer[*].attn.q | layer[*].attn.v", "h += NAMElora(x, r=3, alpha=6, dropout=0.1)", True),
    "adapter": ("layer[*].ffn", "h += NAMEadapter(h, r=3, act=gelu)", False),
    "linear adapter": ("layer[*].ffn", "h += 2 * NAMEadapter(h, r=3, act=none)", True),
    "no bias": ("layer[*].attn", "h += NAMEadapter(x, r=3, act=tanh, bias=false)", False),
    "lowrank": ("layer[*].attn.v", "w += NAMElowrank(r=3)", True),
    "magnitude": ("layer[*].attn.v", "w = NAMEmagnitude(w + NAMElowrank(r=2))", True),
    "vector": ("layer[*].attn.k | layer[*].ffn.hidden", "h *= NAMEvector(init=1)", True),
    "hadamard": ("layer[*].attn.q", "w += NAMEhadamard(r=2)", True),
    "gate": ("layer[*].ffn", "let g = NAMEgate(h) h = g * h", False),
    "product": ("layer[*].attn.q", "w += NAMEproduct(w, r=2)", True),
    "per task": ("layer[*].attn.q", "h += NAMElora(x, r=3)", False),
}
MODELS = ("bert", "gpt2", "llama", "t5")


def spec_of(name: str, prefix: str) -> str:
    at, equation, _ = EQUATIONS[name]
    tasks = " per task" if name == "per task" else ""
    head = f"{PAPERS}\n" if prefix else "peft 1\n"
    return f"{head}edit e at {at}{tasks} {{ {equation.replace('NAME', prefix)} }}\n"


def compiled(model: str, name: str, prefix: str) -> nn.Module:
    base = zoo.build(model, torch.float64).eval()
    options: dict[str, Any] = {"tasks": ["a", "b"]} if name == "per task" else {}
    peftc.compile(spec_of(name, prefix), base, seed=0, **options)
    return base


def run(model: nn.Module, name: str) -> Tensor:
    """The output of a model, with a task where its edits have tasks."""
    has_tasks = is_installed(model) and any(".tasks." in saved for saved in peftc.parameters(model))
    with peftc.task(model, "b") if has_tasks else nullcontext():
        out = model(**zoo.inputs(name, model))
    return out.logits if "logits" in out else out[0]
