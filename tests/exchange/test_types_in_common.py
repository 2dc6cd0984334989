"""Types of PEFT that modules, tasks or tied weights have in common."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import peftc
from peftc.exchange.peft_format.rows.places import TOKENS_FORM
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
QV: dict[str, Any] = {"target_modules": ["q_proj", "up_proj", "down_proj"]}
BERT: dict[str, Any] = {"target_modules": ["query", "dense"]}
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
POLY: dict[str, Any] = {"r": 4, "n_tasks": 3, "n_skills": 3, **QV, **CAUSAL}
MPT: dict[str, Any] = {"num_virtual_tokens": 3, "num_tasks": 3, "num_ranks": 2}
ROUNDED = 1e-6  # PEFT has prompts in float32
# The model, the type, its options, and whether PEFT chooses a task.
CASES: dict[str, tuple[str, Any, dict[str, Any], bool, float | None]] = {
    "Lily": ("llama", peft.LilyConfig, {"r": 4, "num_B": 3, "scaling": 0.5, **QV}, False, None),
    "Lily with strides": ("bert", peft.LilyConfig, {"r": 3, "stride_A": 2, **BERT}, False, None),
    "Poly": ("llama", peft.PolyConfig, POLY, True, None),
    "Poly of parts": ("llama", peft.PolyConfig, {**POLY, "n_splits": 2}, True, None),
    "MPT": ("llama", peft.MultitaskPromptTuningConfig, {**MPT, **CAUSAL}, True, ROUNDED),
    "MPT of an encoder": (
        "bart",
        peft.MultitaskPromptTuningConfig,
        {**MPT, "num_transformer_submodules": 1, "task_type": "SEQ_2_SEQ_LM"},
        True,
        ROUNDED,
    ),
}


def squares(model: nn.Module, parameters: list[nn.Parameter], inputs: Any, tokens: int) -> torch.Tensor:
    """The sum of squares of all gradients together, which does not depend on names."""
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    model(**inputs).logits[:, -tokens:].square().mean().backward()
    return torch.stack([p.grad.double().square().sum() for p in parameters if p.grad is not None]).sum()


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_peft(case: str, tmp_path: Path) -> None:
    name, type_, options, has_tasks, rounding = CASES[case]
    trained(name, tmp_path / "in", type_=type_, **options)
    peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64))
    ours, theirs = loaded(name, tmp_path / "ours"), in_peft(name, tmp_path / "in")
    in_file = tensors(tmp_path / "in")
    adapted = [p for n, p in theirs.named_parameters() if n.replace(".default", "") in in_file or "prompt_encoder" in n]
    for padding in (None, "right"):
        inputs = zoo.inputs(name, ours, padding=padding)
        if name == "bart" and has_tasks:  # of which PEFT makes the tokens of the decoder
            inputs["labels"] = inputs.pop("decoder_input_ids")
        choice = {"task_ids": torch.tensor([2, 0])} if has_tasks else {}
        with peftc.task(ours, task_ids=[2, 0]) if has_tasks else nullcontext():
            with torch.no_grad():
                own = ours(**inputs).logits
                close(theirs(**inputs, **choice).logits[:, -own.shape[1] :], own, case, rounding)
            norms = squares(ours, list(peftc.parameters(ours).values()), inputs, own.shape[1])
        assert norms > 0
        close(squares(theirs, adapted, {**inputs, **choice}, own.shape[1]) / norms, norms / norms, case, rounding)


def test_maps_that_modules_have_in_common_are_trained_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"r": 3, "stride_A": 2, "num_B": 2, "target_modules": ["q_proj", "v_proj"]}
    trained("llama", tmp_path / "in", type_=peft.LilyConfig, **options)
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build("llama", torch.float64))
    assert "edit lily_1 at layer[*].attn.q { h += lily(x, r=3, n=2, stride=2) }" in result.spec
    own = peftc.parameters(loaded("llama", tmp_path / "ours"))
    count = {end: sum(name.rpartition(".")[2] == end for name in own) for end in ("A_0", "A_1", "B", "router")}
    assert count == {"A_0": 2, "A_1": 2, "B": 2, "router": 6}
    key = "base_model.model.model.layers.1.self_attn.q_proj.lily_A.weight"
    change(tmp_path, {}, **{key: 2 * tensors(tmp_path / "in")[key]})
    assert "other values than the same tensor" in import_refused("P804", tmp_path).message


def test_which_matrices_are_common_is_known_by_names(tmp_path: Path) -> None:
    trained("llama", tmp_path / "in", type_=peft.LilyConfig, r=3, target_modules=".*q_proj")
    assert "by a list of names" in import_refused("P802", tmp_path).message


def test_rows_before_a_decoder(tmp_path: Path) -> None:
    trained("bart", tmp_path / "in", type_=peft.MultitaskPromptTuningConfig, **MPT, task_type="SEQ_2_SEQ_LM")
    assert (
        "before the tokens of the decoder" in import_refused("P802", tmp_path, zoo.build("bart", torch.float64)).message
    )


TIED: dict[str, Any] = {"tie_word_embeddings": True}
EMBEDDINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "untied": ("llama", {}, "edit trainable_tokens at embed { w = trainable_tokens(w, n=4) }"),
    "tied": ("llama", TIED, "edit trainable_tokens at embed | head { w = tokens(w) }"),
    "with positions": ("gpt2", TIED, "edit trainable_tokens at embed | head { w = tokens(w) }"),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_rows_of_embeddings_come_and_go_back(case: str, tmp_path: Path) -> None:
    name, options, edit = EMBEDDINGS[case]
    inputs = zoo.inputs(name, zoo.build(name, torch.float64, **options))
    indices = [*inputs["input_ids"][0, 2:4].tolist(), 60, zoo.PAD]
    base = zoo.build(name, torch.float64, **options)
    theirs: Any = peft.get_peft_model(base, peft.TrainableTokensConfig(token_indices=indices)).eval()
    (values,) = (p for p in theirs.parameters() if p.requires_grad)
    nn.init.normal_(values, std=0.2, generator=torch.Generator().manual_seed(0))
    theirs.save_pretrained(tmp_path / "in")
    result = peftc.import_adapter(tmp_path / "in", tmp_path / "ours", model=zoo.build(name, torch.float64, **options))
    assert edit in result.spec
    ours = peftc.load(tmp_path / "ours", zoo.build(name, torch.float64, **options)).eval()
    (own,) = peftc.parameters(ours).values()
    for model, parameter in ((ours, own), (theirs, values)):
        model(**inputs).logits.square().mean().backward()
        assert parameter.grad is not None
        assert parameter.grad.any()
    assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)
    close(own.grad, values.grad, case)  # pyright: ignore[reportArgumentType]
    report = peftc.export(ours, tmp_path / "back")
    assert report.type == "TRAINABLE_TOKENS"
    one, two = tensors(tmp_path / "in"), tensors(tmp_path / "back")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    again = in_peft(name, tmp_path / "back", **options)
    assert torch.equal(ours(**inputs).logits, again(**inputs).logits)
    peftc.fold(ours)
    close(ours(**inputs).logits, again(**inputs).logits, case)


DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"token_indices": [3, 3]}, "different numbers of tokens"),
    "too large": ({"token_indices": [3, 61]}, "the embedding has 61 rows"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_rows_that_an_embedding_does_not_have(case: str, tmp_path: Path) -> None:
    keys, part = DAMAGES[case]
    trained("llama", tmp_path / "in", type_=peft.TrainableTokensConfig, token_indices=[3, 4])
    change(tmp_path, keys)
    assert part in import_refused("P802", tmp_path).message


def test_a_tied_head_with_a_bias(tmp_path: Path) -> None:
    """PEFT leaves out the bias."""
    trained(
        "bert", tmp_path / "in", type_=peft.TrainableTokensConfig, token_indices=[3], target_modules=["word_embeddings"]
    )
    assert (
        "has a bias, which PEFT leaves out"
        in import_refused("P802", tmp_path, zoo.build("bert", torch.float64)).message
    )


def test_one_use_of_a_tied_embedding(tmp_path: Path) -> None:
    edit = f"{TOKENS_FORM}\nedit e at embed {{ w = trainable_tokens(w, n=3) }}"
    reason = export_refused("P801", edited("llama", edit, **TIED), tmp_path)
    assert "which are tied, together" in reason.message
