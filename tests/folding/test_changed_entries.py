"""The number of base entries that a fold changes is the plan's count, or at most that count if
entries are selected.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.laws.harness import randomise

AT = "layer[*].attn.q"
SPECS = {
    "fishmask": "use fishmask from std\napply fishmask()",
    "lt-sft": "use lt_sft from std\napply lt_sft()",
    "far": "use far from std\napply far()",
    "diff-pruning": "use diff_pruning from std\napply diff_pruning()",
    "whole beside chosen": f"edit a at {AT} {{ w += lowrank(r=2)  b += sparse(density=0.2, select=random) }}",
    "two edits of one weight": (
        f"edit a at {AT} {{ w += sparse(density=0.1, select=random) }}\nedit b at {AT} {{ h += lora(x, r=2) }}"
    ),
    "a shared choice": (
        f"let s = shared(sparse(density=0.1, select=random))\nedit a at {AT} {{ w = w - 2 * s() }}\n"
        "edit b at layer[*].attn.v { w += s() }"
    ),
    "not only added": f"edit a at {AT} {{ w = magnitude(w + sparse(density=0.1, select=random)) }}",
}


def entries(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("spec", SPECS)
def test_as_many_entries_differ_as_the_plan_says(spec: str) -> None:
    text = f"peft 1\n{SPECS[spec]}\n"
    model: Any = zoo.build("bert", torch.float64)
    before, total = entries(model), peftc.plan(text, model).totals.changed
    peftc.compile(text, model, seed=0)
    data, gates = [zoo.inputs("bert", model, labels=True)], (".alpha", ".group")
    if spec in ("fishmask", "lt-sft", "far"):
        peftc.calibrate(model, data)
    randomise({name: p for name, p in peftc.parameters(model).items() if not name.endswith(gates)})
    if spec == "diff-pruning":  # which is pruned after its training
        peftc.calibrate(model)
    peftc.fold(model)
    after = entries(model)
    assert sum(int((after[name] != value).sum()) for name, value in before.items()) == total
