"""LLaMA-Adapter of PEFT comes in and goes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import peft.tuners.adaption_prompt.layer as layer_of_peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import peftc
from peftc.exchange.peft_format.rows.attention.adaption import FORM
from tests import zoo
from tests.exchange.adapters import edited
from tests.exchange.test_import import trained
from tests.exchange.types_of_peft import Case, assert_comes_and_goes_back
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
OPTIONS: dict[str, Any] = {"adapter_len": 3, "adapter_layers": 2, "task_type": "CAUSAL_LM"}


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT computes it in float32, whatever the model has."""

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.softmax(x, dim)

    monkeypatch.setattr(layer_of_peft, "F", SimpleNamespace(softmax=softmax))


CASES: dict[str, Case] = {
    f"{name}, {layers}": (name, peft.AdaptionPromptConfig, {**OPTIONS, "adapter_layers": layers})
    for name in ("llama", "mistral")
    for layers in (2, 1)
}


@pytest.mark.parametrize("case", CASES)
def test_it_comes_and_goes_back(case: str, tmp_path: Path) -> None:
    assert_comes_and_goes_back(CASES[case], tmp_path)


def test_the_spec_is_what_a_person_would_write(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.AdaptionPromptConfig, **OPTIONS)
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama"))
    last = "edit adaption_prompt at layer[1..2].attn.heads { h += adaption_prompt(q, weight(k, v), len=3) }\n"
    assert result.spec.endswith(f"}}\n\n{last}")
    assert result.tensors == 4


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    trained("llama", folder, type_=peft.AdaptionPromptConfig, **OPTIONS)
    return load_file(folder / "adapter_model.safetensors")


KEY = "base_model.model.model.layers.1.self_attn.adaption_gate"
DAMAGED = {
    "no gate": ("P803", {KEY: None}),
    "another tensor": ("P802", {KEY.replace("gate", "door"): torch.zeros(1)}),
    "another layer": ("P804", {KEY.replace(".1.", ".0."): torch.zeros(1)}),
    "more tokens": ("P803", {KEY.replace("gate", "prompt"): torch.zeros(1, 4, 32)}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_that_do_not_fit(case: str, tmp_path: Path) -> None:
    code, changes = DAMAGED[case]
    tensors = {**adapter(tmp_path / "in"), **changes}
    save_file({k: t for k, t in tensors.items() if t is not None}, tmp_path / "in/adapter_model.safetensors")
    model = zoo.build("llama")
    refused(code, lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model), model)


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        ("llama", {"attention_bias": True}, "the biases of the projections"),
        ("llama", {"head_dim": 16}, "the features of a head"),
        ("gpt2", {}, "whose Linears are `k_proj`"),
        ("qwen3", {"head_dim": 8}, "without their norm"),
    ],
)
def test_where_peft_computes_something_else(name: str, overrides: Any, reason: str, tmp_path: Path) -> None:
    adapter(tmp_path / "in")
    model = zoo.build(name, **overrides)
    diagnostic = refused("P802", lambda: peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=model), model)
    assert reason in diagnostic.message


LEAVING = {
    "the first layers": "edit e at layer[0..1].attn.heads { h += adaption_prompt(q, weight(k, v), len=2) }",
    "two numbers of tokens": "edit e at layer[*].attn.heads { h += adaption_prompt(q, weight(k, v), len=2 + layer) }",
}


@pytest.mark.parametrize("case", LEAVING)
def test_what_peft_has_not_stays(case: str, tmp_path: Path) -> None:
    model = edited("llama", f"{FORM}\n{LEAVING[case]}")
    diagnostic = refused("P801", lambda: peftc.export(model, tmp_path / "out"))
    assert "PEFT has" in "\n".join([diagnostic.message, *diagnostic.notes])
