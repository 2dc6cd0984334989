"""Experts in code that people write: loops with masks, counts or capacities, which no trace can
follow, matrices gathered for each token, and experts that all run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import peftc
from benchmarks.foreign_checks.checks import checked
from benchmarks.foreign_checks.roles import compared
from benchmarks.foreign_models.case import Case
from benchmarks.foreign_models.hand_written import experts, mixtures, original_gpt_oss

EVERY = (*experts.CASES, *mixtures.CASES, *original_gpt_oss.CASES)
CASES = {case.name.rpartition("/")[2]: case for case in EVERY}


def model_of(case: Case) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return case.build().double(), {n: v.double() if v.is_floating_point() else v for n, v in case.inputs().items()}


@pytest.mark.parametrize("name", CASES)
def test_the_roles_are_those_of_the_source(name: str) -> None:
    model, inputs = model_of(CASES[name])
    table = peftc.sites(model, sample=inputs)
    comparison = compared(CASES[name], model, table)
    assert (comparison.missing, comparison.wrong) == ([], [])
    assert table.untraced == ()


@pytest.mark.parametrize("name", ["moe_counts", "moe_gathered", "moe_lists", "gpt_oss"])
def test_edits_compute_and_fold_as_the_reference(name: str) -> None:
    verdicts = {edit: answer["verdict"] for edit, answer in checked(CASES[name], "bc", dynamo=False)["edits"].items()}
    assert verdicts == {"b": "pass", "c": "pass"}


@pytest.mark.parametrize(("name", "weight"), [("moe_lists", "w_gate"), ("moe_counts", "gate.weight")])
def test_a_router_of_a_bare_parameter(name: str, weight: str) -> None:
    """Its weight can be edited, also where the code around it cannot be traced, and folds."""
    model, inputs = model_of(CASES[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    peftc.compile("peft 1\nedit e at layer[1].ffn.router { w += lowrank(r=2) }", model, sample=inputs, seed=0)
    for parameter in peftc.parameters(model).values():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        expected = model(**inputs)
        peftc.fold(model)
        assert torch.allclose(model(**inputs), expected, rtol=0, atol=1e-10)
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert changed == [f"blocks.1.moe.{weight}"]


def test_a_hidden_state_of_an_expert_in_a_loop() -> None:
    """Each expert's own forward is rewritten, which only sees the tokens that were sent to it."""
    model, inputs = model_of(CASES["moe_masks"])
    moe: Any = model.get_submodule("blocks.0.moe")
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        base, chosen = moe(x), (moe.gate(x).topk(2)[1] == 2).any(-1)
    text = "peft 1\nedit e at layer[0].ffn.experts[2].up { h += lora(x, r=2) }"
    peftc.compile(text, model, sample=inputs, seed=0)
    with torch.no_grad():
        assert torch.equal(moe(x), base)
        for parameter in peftc.parameters(model).values():
            torch.nn.init.normal_(parameter)
        assert torch.equal((moe(x) != base).any(-1), chosen)
    assert 0 < chosen.sum() < chosen.numel()
