"""Experts in code that people write: loops with masks, counts or capacities, which no trace can
follow, matrices gathered for each token, and experts that all run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from benchmarks.foreign_checks.checks import checked
from benchmarks.foreign_checks.roles import compared
from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.hand_written import experts, mixtures, original_gpt_oss
from tests.layers import Attention, Layers, functional

D, M, COUNT = 8, 12, 3


class Halves(nn.Module):
    """One Linear computes the gate and what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(D, 2 * M), nn.Linear(M, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class Mixture(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense
        self.router, self.experts = nn.Linear(D, COUNT), nn.ModuleList(Halves() for _ in range(COUNT))
        self.shared = Halves()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(COUNT if self.dense else 2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.dense:
                out = out + (weights * (index == i)).sum(-1, keepdim=True) * expert(x)
                continue
            *token, choice = torch.where(index == i)
            out[tuple(token)] += weights[(*token, choice)][:, None] * expert(x[tuple(token)])
        return out + self.shared(x)


class Block(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(D), Mixture(dense)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.ffn(x)


def halves(at: str, kind: str) -> dict[str, str]:
    both = f"layers.{{i}}.ffn.{at}.both.weight"
    roles = {"gate": f"{both}[0:{M}]", "up": f"{both}[{M}:{2 * M}]", "down": f"layers.{{i}}.ffn.{at}.down.weight"}
    return {f"ffn.{kind}.{role}": weight for role, weight in roles.items()}


HALVES = Stack(
    (0, 1),
    {
        **{f"attn.{role}": f"layers.{{i}}.attn.{role}.weight" for role in "qkvo"},
        "ffn.router": "layers.{i}.ffn.router.weight",
        **halves(f"experts.{{0..{COUNT - 1}}}", "experts"),
        **halves("shared", "shared"),
    },
    states={"ffn.x": "layers.{i}.ffn", "ffn.h": "layers.{i}.ffn"},
)


def of_halves(dense: bool) -> Case:
    name = f"hand-written/halves, {'all experts' if dense else 'chosen experts'}"

    def build() -> nn.Module:
        return Layers(Block(dense), Block(dense))

    return Case(name, "hand-written", build, lambda: {"x": torch.randn(2, 5, D)}, (HALVES,))


EVERY = (of_halves(True), of_halves(False), *experts.CASES, *mixtures.CASES, *original_gpt_oss.CASES)
OF_HALVES = ["halves, all experts", "halves, chosen experts"]
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


@pytest.mark.parametrize("name", ["moe_counts", "moe_gathered", "moe_lists", "gpt_oss", *OF_HALVES])
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
