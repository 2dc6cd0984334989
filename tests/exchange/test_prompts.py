"""Rows before the tokens of the input, of PEFT and of peftc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import peftc
from tests import zoo
from tests.exchange.adapters import edited, in_peft, tensors
from tests.exchange.test_export_refusals import export_refused
from tests.exchange.test_import import import_refused, loaded, trained
from tests.exchange.test_import_refusals import change
from tests.laws.harness import close

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
CAUSAL, BOTH = {"task_type": "CAUSAL_LM"}, {"task_type": "SEQ_2_SEQ_LM"}
CPT = {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "prompt tuning": ("llama", peft.PromptTuningConfig, CAUSAL),
    "of learned positions": ("gpt2", peft.PromptTuningConfig, CAUSAL),
    "of positions by the mask": ("opt", peft.PromptTuningConfig, CAUSAL),
    "of an encoder and a decoder": ("t5", peft.PromptTuningConfig, BOTH),
    "of one submodule": ("bart", peft.PromptTuningConfig, {**BOTH, "num_transformer_submodules": 1}),
    "P-tuning": ("llama", peft.PromptEncoderConfig, {**CAUSAL, "encoder_hidden_size": 8}),
    "P-tuning with an LSTM": (
        "bart",
        peft.PromptEncoderConfig,
        {**BOTH, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"},
    ),
    "CPT": ("llama", peft.CPTConfig, {**CAUSAL, **CPT}),
}


def assert_same_tokens(ours: torch.nn.Module, theirs: torch.nn.Module, name: str) -> None:
    """PEFT returns logits for the rows of the prompt, too."""
    for padding in (None, "right"):
        inputs = zoo.inputs(name, ours, padding=padding)
        with torch.no_grad():
            own = ours(**inputs).logits
            close(theirs(**inputs).logits[:, -own.shape[1] :], own, name)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_comes_and_goes_back(case: str, tmp_path: Path) -> None:
    name, type_, options = CASES[case]
    trained(name, tmp_path / "in", type_=type_, num_virtual_tokens=3, **options)
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    assert "at input.embed { h = concat(prompt(len=3), h) }" in result.spec
    ours = loaded(name, tmp_path / "ours")
    assert_same_tokens(ours, in_peft(name, tmp_path / "in"), name)
    assert peftc.export(ours, tmp_path / "back").type == "PROMPT_TUNING"
    (one,), (two,) = tensors(tmp_path / "in").values(), tensors(tmp_path / "back").values()
    assert torch.equal(one[:3], two)
    assert_same_tokens(ours, in_peft(name, tmp_path / "back"), name)


def test_a_row_with_padding_on_the_left_computes_what_it_does_without(tmp_path: Path) -> None:
    """PEFT counts padding between the prompt and the text as positions; peftc does not."""
    trained("llama", tmp_path / "in", type_=peft.PromptTuningConfig, num_virtual_tokens=3, **CAUSAL)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    ours, theirs = loaded("llama", tmp_path / "ours"), in_peft("llama", tmp_path / "in")
    inputs = zoo.inputs("llama", ours, padding="left")
    pads = int((inputs["attention_mask"][1] == 0).sum())
    assert pads > 0
    with torch.no_grad():
        alone = theirs(input_ids=inputs["input_ids"][1:, pads:]).logits[:, 3:]
        torch.testing.assert_close(ours(**inputs).logits[1:, pads:], alone, atol=1e-5, rtol=0)  # RoPE is of float32


@pytest.mark.parametrize("options", ["reparam=mlp(8)", "reparam=mlp(8), intrinsic=2"])
def test_what_an_mlp_makes_leaves_as_its_rows(options: str, tmp_path: Path) -> None:
    model = edited("llama", f"edit p at input.embed {{ h = concat(prompt(len=3, {options}), h) }}")
    report = peftc.export(model, tmp_path / "out")
    assert "in float32" in str(report)
    assert tensors(tmp_path / "out")["prompt_embeddings"].shape == (3, 32)
    inputs, theirs = zoo.inputs("llama", model), in_peft("llama", tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, theirs(**inputs).logits[:, 3:], atol=1e-5, rtol=0)


PROMPT = "edit p at {} {{ h = concat(prompt(len=3), h) }}"
REFUSED = {
    "a decoder": ("bart", PROMPT.format("decoder.embed"), "at `input.embed` alone"),
    "a classifier": ("bert-classifier", PROMPT.format("input.embed"), "at another place"),
    "a whole module": ("llama", PROMPT.format("input.embed") + "\ntrain t = [w] at head", "saved whole"),
    "another edit": (
        "llama",
        PROMPT.format("input.embed") + "\nedit q at layer[*].attn.q { h += lora(x, r=2) }",
        "`concat(prompt(), h)`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_has_no_prompt_for(case: str, tmp_path: Path) -> None:
    name, spec, reason = REFUSED[case]
    assert reason in str(export_refused("P801", edited(name, spec), tmp_path))


DAMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "another task": ("P802", {"task_type": "SEQ_CLS"}, {}, "`task_type: 'SEQ_CLS'`"),
    "another model": ("P804", {"task_type": "SEQ_2_SEQ_LM"}, {}, "encoder and decoder"),
    "another length": ("P802", {"num_virtual_tokens": 2}, {}, "there are 3 rows"),
    "another width": ("P804", {}, {"prompt_embeddings": torch.ones(3, 31)}, "[3, 31]"),
    "no rows": ("P803", {}, {"prompt_embeddings": None}, "no tensor `prompt_embeddings`"),
    "a head": ("P802", {}, {"base_model.lm_head.weight": torch.ones(61, 32)}, "base_model.lm_head.weight"),
    "an unknown key": ("P802", {"prompt_gate": True}, {}, "prompt_gate"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_it_is_said_what_is_wrong(case: str, tmp_path: Path) -> None:
    code, keys, own, part = DAMAGES[case]
    trained("llama", tmp_path / "in", type_=peft.PromptTuningConfig, num_virtual_tokens=3, **CAUSAL)
    change(tmp_path, keys, **own)
    assert part in import_refused(code, tmp_path).message
