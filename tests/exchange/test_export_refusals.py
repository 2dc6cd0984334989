"""What PEFT would load as another function is not exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import peftc
from tests import zoo
from tests.exchange.adapters import edited
from tests.refusals import refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
QV = "edit a at layer[*].attn.q | layer[*].attn.v { h += lora(x, r=2) }"


def export_refused(code: str, model: nn.Module, folder: Path, **options: Any) -> peftc.Diagnostic:
    diagnostic = refused(code, lambda: peftc.export(model, folder / "no", **options))
    assert not (folder / "no").exists()
    return diagnostic


@pytest.mark.parametrize("edit", [QV, ""], ids=["beside a LoRA", "alone"])
@pytest.mark.parametrize("place", ["head", "embed"])
def test_a_tied_parameter_has_two_uses_of_which_peft_changes_one(place: str, edit: str, tmp_path: Path) -> None:
    model = edited("llama", f"{edit}\ntrain t = [w] at {place}", tie_word_embeddings=True)
    assert "are one parameter" in export_refused("P801", model, tmp_path).message


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ("embed { w += sparse(density=10%) }", "has the full rank of the weight"),
        ("layer[*].attn.q { w += sparse(density=10%) }", "has the full rank of the weight"),
        ("layer[*].attn.q { w += masked(density=10%) }", "has the full rank of the weight"),
        ("layer[*].attn.q { w += fastfood(d=16) }", "has the full rank of the weight"),
        ("layer[*].attn.q { h *= scalar(init=1) }", "leaves the weight as it is"),
    ],
)
def test_what_changes_nothing_before_training_is_no_lora_either(edit: str, reason: str, tmp_path: Path) -> None:
    model = peftc.compile(f"peft 2\nedit e at {edit}\n", zoo.build("llama"), seed=0)
    assert reason in export_refused("P801", model, tmp_path).message


def test_a_linear_in_two_layers_is_one_module(tmp_path: Path) -> None:
    model: Any = zoo.build("llama", torch.float64)
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    peftc.compile("peft 2\nedit a at layer[0].attn.q | layer[1].attn.q { h += lora(x, r=2) }\n", model, seed=0)
    diagnostic = export_refused("P801", model, tmp_path)
    assert "layers.0.self_attn.q_proj` and `model.layers.1.self_attn.q_proj` are one module" in diagnostic.message


def test_parameters_that_no_edit_trains(tmp_path: Path) -> None:
    model = edited("llama", QV)
    model.lm_head.weight.requires_grad_(True)
    assert "lm_head.weight" in export_refused("P583", model, tmp_path).message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_are_finite(value: float, tmp_path: Path) -> None:
    model = edited("llama", QV)
    with torch.no_grad():
        next(iter(peftc.parameters(model).values())).fill_(value)
    export_refused("P561", model, tmp_path)
    export_refused("P561", model, tmp_path, max_rank=1, svd=True)


def test_a_model_that_peft_has_wrapped(tmp_path: Path) -> None:
    theirs: Any = peft.get_peft_model(zoo.build("llama"), peft.LoraConfig(target_modules=["down_proj"]))
    for parameter in theirs.parameters():
        parameter.requires_grad_(False)
    peftc.compile(f"peft 2\n{QV}\n", theirs, seed=0)
    assert "an adapter of PEFT already" in export_refused("P801", theirs, tmp_path).message


@pytest.mark.parametrize("rank", [0, -3, "8", True, 2.0])
def test_a_rank_is_a_number_from_one_on(rank: Any, tmp_path: Path) -> None:
    for svd in (False, True):
        assert "max_rank" in export_refused("P545", edited("llama", QV), tmp_path, max_rank=rank, svd=svd).message


def test_help_is_given_where_it_helps(tmp_path: Path) -> None:
    whole = edited(
        "llama", "edit a at layer[*].attn.q { w = magnitude(w + lowrank(r=2)) }\n" + QV.replace("a at", "b at")
    )
    assert "svd=True" in (export_refused("P801", whole, tmp_path).help or "")
    peftc.export(whole, tmp_path / "near", max_rank=32, svd=True)
    constant = edited("llama", "edit a at layer[*].attn.q { h += vector(init=0) + lora(x, r=2) }")
    assert export_refused("P801", constant, tmp_path).help is None
    export_refused("P801", constant, tmp_path, max_rank=32, svd=True)
