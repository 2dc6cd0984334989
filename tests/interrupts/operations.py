"""The operations to interrupt, each with its preparation."""

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
    """A model, its folder, and the action to interrupt."""

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
    """Saves an adapter of the same base into the folder of a case."""
    other = case(spec)
    peftc.save(other.model, like.folder)
    return like


def compile_() -> Case:
    scenario = case(None)
    scenario.action = lambda: peftc.compile(TWO, scenario.model, seed=0, name="one")
    return scenario


def compile_inside() -> Case:
    scenario = case(None)
    scenario.action = lambda: peftc.compile(INSIDE, scenario.model, seed=0, name="one")
    return scenario


def load() -> Case:
    scenario = saved(TWO, case(None))
    scenario.action = lambda: peftc.load(scenario.folder, scenario.model, name="one")
    return scenario


def save() -> Case:
    scenario = saved(LORA, case(TWO))
    scenario.action = lambda: peftc.save(scenario.model, scenario.folder)
    return scenario


def fold() -> Case:
    scenario = case(LORA)
    scenario.action = lambda: peftc.fold(scenario.model)
    return scenario


def fold_in_part() -> Case:
    scenario = case(TWO)
    scenario.action = lambda: peftc.fold(scenario.model)
    return scenario


def widen() -> Case:
    scenario = case(WIDE, "t5")
    scenario.action = lambda: peftc.fold(scenario.model, widen=True)
    return scenario


def fold_and_widen() -> Case:
    """Two writes of the weights in a row."""
    scenario = case(LORA + WIDE.removeprefix(HEADER), "t5")
    scenario.action = lambda: peftc.fold(scenario.model, widen=True)
    return scenario


def remove() -> Case:
    scenario = case(TWO)
    scenario.action = lambda: peftc.remove(scenario.model)
    return scenario


def remove_one() -> Case:
    scenario = case(TWO)
    peftc.compile(
        HEADER + "edit b at layer[*].attn.o { h += lora(x, r=2) }\ntrain u = [w] at layer[*].attn.norm",
        scenario.model,
        seed=0,
        name="two",
    )
    scenario.action = lambda: peftc.remove(scenario.model, "one")
    return scenario


def disabled() -> Case:
    scenario = case(TWO)

    def action() -> None:
        with peftc.disabled(scenario.model):
            run(scenario.model)

    scenario.action = action
    return scenario


def task() -> Case:
    scenario = case(TASKS, tasks=["x", "y"])

    def action() -> None:
        with peftc.task(scenario.model, "y"):
            run(scenario.model)

    peftc.set_task(scenario.model, "x")
    scenario.action = action
    return scenario


def add_task() -> Case:
    scenario = case(TASKS, tasks=["x", "y"])
    peftc.set_task(scenario.model, "x")
    scenario.action = lambda: peftc.add_task(scenario.model, "z", like="x")
    return scenario


def drop_task() -> Case:
    scenario = case(TASKS, tasks=["x", "y"])
    peftc.set_task(scenario.model, "x")
    scenario.action = lambda: peftc.drop_task(scenario.model, "x")
    return scenario


def set_enabled() -> Case:
    scenario = case(TWO)
    scenario.action = lambda: peftc.set_enabled(scenario.model, False)
    return scenario


def calibrate() -> Case:
    scenario = case(CHOSEN)
    batch = {**zoo.inputs("llama", scenario.model)}
    batch["labels"] = batch["input_ids"]
    scenario.action = lambda: peftc.calibrate(scenario.model, [batch])
    return scenario


def warm_start() -> Case:
    scenario = saved(LORA, case(LORA))
    scenario.action = lambda: peftc.warm_start(scenario.model, scenario.folder)
    return scenario


def fuse() -> Case:
    scenario = saved(PLAIN, case(MIXED))
    scenario.action = lambda: peftc.fuse(scenario.model, scenario.folder)
    return scenario


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
