"""A model that is named as the base of a saved adapter stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo

LORA = "peft 2\n\nedit qv at layer[*].attn.{q, v} { h += lora(x, r=2) }\n"
BOTTLENECK = "peft 2\n\nedit ffn at layer[*].ffn { h += adapter(h, r=2) }\n"

ACTIONS: dict[str, Callable[[Path, Path, nn.Module], object]] = {
    "export": lambda adapter, out, model: peftc.export(adapter, out, model=model),
    "convert": lambda adapter, out, model: peftc.convert(adapter, out, rank=2, model=model),
    "inspect": lambda adapter, out, model: peftc.inspect(adapter, model=model),
}


def state(model: nn.Module) -> tuple[Any, ...]:
    """Its parameters, the same objects, their flags and bits; its classes and specs."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return (
        {name: id(p) for name, p in parameters.items()},
        {name: p.requires_grad for name, p in parameters.items()},
        {name: p.detach().clone().numpy().tobytes() for name, p in parameters.items()},
        [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)],
    )


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("action", ACTIONS)
def test_the_model_is_not_changed(action: str, refused: bool, is_compiled: bool, tmp_path: Path) -> None:
    spec = BOTTLENECK if refused else LORA
    peftc.save(peftc.compile(spec, zoo.build("llama", torch.float32), seed=0), tmp_path / "adapter")
    model = zoo.build("llama", torch.float32)
    next(model.parameters()).requires_grad_(False)
    if is_compiled:
        peftc.compile(LORA.replace("qv", "other"), model, seed=1)
    before = state(model)
    with pytest.raises(peftc.PeftcError, match="P801") if refused and action != "inspect" else nullcontext():
        ACTIONS[action](tmp_path / "adapter", tmp_path / "out", model)
    assert state(model) == before


def test_the_edits_of_the_model_do_not_leave_with_the_adapter(tmp_path: Path) -> None:
    spec = LORA
    peftc.save(peftc.compile(spec, zoo.build("llama", torch.float32), seed=0), tmp_path / "adapter")
    model = peftc.compile(spec.replace("qv", "other").replace("{q, v}", "o"), zoo.build("llama", torch.float32))
    report = peftc.export(tmp_path / "adapter", tmp_path / "out", model=model)
    assert {module.module.rpartition(".")[2] for module in report.modules} == {"q_proj", "v_proj"}
