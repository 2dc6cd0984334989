"""Operations on a model, each with what must be there before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import randomise

HEADER = "peft 1\n"
LORA = HEADER + "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }\n"
TWO = LORA + "edit p at layer[*].ffn { h += adapter(h, r=2) }\ntrain t = [w] at norm\n"
INSIDE = HEADER + "edit k at layer[*].attn { kv = concat(prefix(len=2), kv) }\n"
WIDE = HEADER + "edit w at layer[*].ffn { h += adapter(x, r=2, act=relu) }\n"
TASKS = HEADER + "edit t at layer[*].attn.q per task { h += lora(x, r=2) }\n"
CHOSEN = HEADER + "edit s at layer[*].attn.q { w += sparse(density=10%, select=change) }\n"
MIXED = HEADER + "edit f at layer[*].ffn { h += fusion(h, n=1, r=2) }\n"
PLAIN = HEADER + "edit f at layer[*].ffn { h += adapter(h, r=2) }\n"


@dataclass
class Case:
    """A model, the folder that goes with it, and what is done."""

    model: nn.Module
    folder: Path
    action: Callable[[], Any]


def case(spec: str | None, name: str = "llama", **options: Any) -> Case:
    size = {"num_hidden_layers": 1} if name == "llama" else {"num_layers": 1, "num_decoder_layers": 1}
    model = zoo.build(name, **size).eval()
    if spec is not None:
        peftc.compile(spec, model, seed=0, name="one", **options)
        randomise(peftc.parameters(model))
    return Case(model, Path(tempfile.mkdtemp()) / "adapter", lambda: None)


def saved(spec: str, like: Case) -> Case:
    """Gives a case an adapter in its folder, of the same base."""
    other = case(spec)
    peftc.save(other.model, like.folder)
    return like


def compile_() -> Case:
    made = case(None)
    made.action = lambda: peftc.compile(TWO, made.model, seed=0, name="one")
    return made


def compile_inside() -> Case:
    made = case(None)
    made.action = lambda: peftc.compile(INSIDE, made.model, seed=0, name="one")
    return made


def load() -> Case:
    made = saved(TWO, case(None))
    made.action = lambda: peftc.load(made.folder, made.model, name="one")
    return made


def save() -> Case:
    made = saved(LORA, case(TWO))
    made.action = lambda: peftc.save(made.model, made.folder)
    return made


def fold() -> Case:
    made = case(LORA)
    made.action = lambda: peftc.fold(made.model)
    return made


def fold_in_part() -> Case:
    made = case(TWO)
    made.action = lambda: peftc.fold(made.model)
    return made


def widen() -> Case:
    made = case(WIDE, "t5")
    made.action = lambda: peftc.fold(made.model, widen=True)
    return made


def fold_and_widen() -> Case:
    """Two writes of the weights, one after the other."""
    made = case(LORA + WIDE.removeprefix(HEADER), "t5")
    made.action = lambda: peftc.fold(made.model, widen=True)
    return made


def remove() -> Case:
    made = case(TWO)
    made.action = lambda: peftc.remove(made.model)
    return made


def remove_one() -> Case:
    made = case(TWO)
    peftc.compile(
        HEADER + "edit b at layer[*].attn.o { h += lora(x, r=2) }\ntrain u = [w] at layer[*].attn.norm",
        made.model,
        seed=0,
        name="two",
    )
    made.action = lambda: peftc.remove(made.model, "one")
    return made


def disabled() -> Case:
    made = case(TWO)

    def action() -> None:
        with peftc.disabled(made.model):
            run(made.model)

    made.action = action
    return made


def task() -> Case:
    made = case(TASKS, tasks=["x", "y"])

    def action() -> None:
        with peftc.task(made.model, "y"):
            run(made.model)

    peftc.set_task(made.model, "x")
    made.action = action
    return made


def add_task() -> Case:
    made = case(TASKS, tasks=["x", "y"])
    peftc.set_task(made.model, "x")
    made.action = lambda: peftc.add_task(made.model, "z", like="x")
    return made


def drop_task() -> Case:
    made = case(TASKS, tasks=["x", "y"])
    peftc.set_task(made.model, "x")
    made.action = lambda: peftc.drop_task(made.model, "x")
    return made


def set_enabled() -> Case:
    made = case(TWO)
    made.action = lambda: peftc.set_enabled(made.model, False)
    return made


def calibrate() -> Case:
    made = case(CHOSEN)
    batch = {**zoo.inputs("llama", made.model)}
    batch["labels"] = batch["input_ids"]
    made.action = lambda: peftc.calibrate(made.model, [batch])
    return made


def warm_start() -> Case:
    made = saved(LORA, case(LORA))
    made.action = lambda: peftc.warm_start(made.model, made.folder)
    return made


def fuse() -> Case:
    made = saved(PLAIN, case(MIXED))
    made.action = lambda: peftc.fuse(made.model, made.folder)
    return made


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    name = "t5" if model.config.model_type == "t5" else "llama"  # type: ignore[union-attr]
    return model(**zoo.inputs(name, model))[0]


OPERATIONS: dict[str, Callable[[], Case]] = {
    "compile": compile_,
    "compile, into code": compile_inside,
    "load": load,
    "save": save,
    "fold": fold,
    "fold in part": fold_in_part,
    "fold, widen": widen,
    "fold, then widen": fold_and_widen,
    "remove": remove,
    "remove one": remove_one,
    "disabled": disabled,
    "task": task,
    "add_task": add_task,
    "drop_task": drop_task,
    "set_enabled": set_enabled,
    "calibrate": calibrate,
    "warm_start": warm_start,
    "fuse": fuse,
}
