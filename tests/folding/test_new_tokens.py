"""Rows of new tokens: trained, saved alone, loaded, folded and merged, also with tied heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import peftc
from peftc.diagnostics import PeftcError
from tests import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
NEW = 5
SPECS = {
    "untied": f"""peft 2
edit embedding at embed {{ w = new_tokens(w, n={NEW}) }}
edit head at head {{ w = new_tokens(w, n={NEW}) }}""",
    "tied": f"""peft 2
let tokens = shared(new_tokens(n={NEW}))
edit rows at embed | head {{ w = tokens(w) }}""",
}
ADDED = "peft 2\nlet change = shared(lowrank(r=2))\nedit rows at embed | head { w += change() }"


def resized(case: str, seed: int = 0) -> Any:
    """A model with five more tokens, whose rows depend on the seed."""
    model: Any = zoo.build("llama", torch.float64, tie_word_embeddings=case == "tied")
    torch.manual_seed(seed)
    model.resize_token_embeddings(model.config.vocab_size + NEW)
    return model


def ids(model: Any) -> Tensor:
    """Tokens of which some are new."""
    result = zoo.inputs("llama", model)["input_ids"].clone()
    result[:, 2:4] = torch.tensor([model.config.vocab_size - 1, model.config.vocab_size - NEW])
    return result


def logits(model: Any) -> Tensor:
    return model(ids(model)).logits


def trained(case: str, spec: str | None = None) -> Any:
    model = peftc.compile(spec or SPECS[case], resized(case), seed=0)
    optimizer = torch.optim.SGD(peftc.parameters(model).values(), lr=1.0)
    for _ in range(2):
        model(ids(model), labels=ids(model)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("case", SPECS)
def test_only_new_rows_are_trained(case: str) -> None:
    base = resized(case)
    width, before = base.config.hidden_size, logits(base)
    count = NEW * width * (1 if case == "tied" else 2)
    assert peftc.plan(SPECS[case], base).totals.trained == count
    assert torch.equal(logits(peftc.compile(SPECS[case], resized(case), seed=0)), before)
    model = trained(case)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == count
    assert not torch.equal(logits(model), before)
    old = zoo.inputs("llama", base)["input_ids"]
    assert torch.equal(model(old).logits[..., :-NEW], base(old).logits[..., :-NEW])
    assert not torch.equal(model(old).logits[..., -NEW:], base(old).logits[..., -NEW:])
    places = list(range(base.config.vocab_size - NEW, base.config.vocab_size))
    targets = None if case == "tied" else ["embed_tokens", "lm_head"]
    config = peft.TrainableTokensConfig(token_indices=places, target_modules=targets)
    theirs: Any = peft.get_peft_model(resized(case), config)
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == count


@pytest.mark.parametrize("case", SPECS)
def test_a_file_has_the_rows_whatever_those_of_the_base_are(case: str, tmp_path: Path) -> None:
    model = trained(case)
    peftc.save(model, tmp_path / "adapter")
    (file,) = (tmp_path / "adapter").glob("*.safetensors")
    sizes = sorted(tuple(tensor.shape) for tensor in load_file(file).values() if tensor.is_floating_point())
    assert sizes == [(NEW, model.config.hidden_size)] * (1 if case == "tied" else 2)
    other = resized(case, seed=9)
    assert not torch.equal(logits(other), logits(resized(case)))
    assert torch.equal(logits(peftc.load(tmp_path / "adapter", other, other_weights=True)), logits(model))


@pytest.mark.parametrize("case", SPECS)
def test_rows_are_folded_merged_and_exported(case: str, tmp_path: Path) -> None:
    model, base = trained(case), resized(case)
    expected = logits(model)
    base.save_pretrained(tmp_path / "base")
    peftc.save(model, tmp_path / "adapter")
    peftc.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == (case == "tied")

    assert peftc.export(model, tmp_path / "peft").type == "TRAINABLE_TOKENS"
    theirs: Any = peft.PeftModel.from_pretrained(resized(case), str(tmp_path / "peft")).eval()
    assert torch.equal(logits(theirs), expected)

    report = peftc.fold(model)
    assert not report.refused
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(weight, merged.state_dict()[name]) for name, weight in model.state_dict().items())
    rows = model.model.embed_tokens.weight[:-NEW]
    assert torch.equal(rows, base.model.embed_tokens.weight[:-NEW])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (case == "tied")


def test_a_change_of_tied_weights_is_folded_once() -> None:
    model = trained("tied", ADDED)
    expected = logits(model)
    assert torch.equal(logits(resized("tied")), expected) is False
    assert not peftc.fold(model).refused
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-10)


OTHERS = {
    "parameters of their own": "edit rows at embed | head { w = new_tokens(w, n=5) }",
    "one of two uses": "edit rows at embed { w = new_tokens(w, n=5) }",
    "two edits": SPECS["untied"].removeprefix("peft 2"),
    "a number of the site": (
        "form other(w) { param v[cols(w)] per edit = ones  let n = site(out)  f = w * (1 + n) * v }\n"
        "edit rows at embed | head { w = other(w) }"
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_changes_of_tied_weights_stay(name: str) -> None:
    model = trained("tied", f"peft 2\n{OTHERS[name]}")
    expected = logits(model)
    report = peftc.fold(model)
    assert report.refused
    assert all("is tied to" in one.reason for one in report.refused)
    assert torch.equal(logits(model), expected)


def test_more_tokens_than_rows() -> None:
    model = zoo.build("llama")
    with pytest.raises(PeftcError, match="P317"):
        peftc.plan(f"peft 2\nedit e at embed {{ w = new_tokens(w, n={10**6}) }}", model)
    form = "form f(w, n) { param v[n, cols(w)] = 0  fixed p[n] = tail(3)  f = w + scatter(v, p, rows(w)) }"
    with pytest.raises(PeftcError, match="`p` has 4 of 3 numbers"):
        peftc.plan(f"peft 2\n{form}\nedit e at embed {{ w = f(w, n=4) }}", model)


def test_tokens_of_a_model_without_a_head() -> None:
    model: Any = zoo.build("bert", torch.float64).base_model
    spec = f"peft 2\nedit e at embed {{ w = new_tokens(w, n={NEW}) }}"
    inputs = zoo.inputs("bert", model)
    before = model(**inputs).last_hidden_state
    peftc.compile(spec, model, seed=0)
    assert torch.equal(model(**inputs).last_hidden_state, before)
