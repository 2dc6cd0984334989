"""resize_token_embeddings of compiled models: tied or not, with edits on the head and on the
embedding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import randomise
from tests.survival.harness import compiled, model_inputs, same, state, train

NAMES = ("bart", "t5", "llama", "bert", "mixtral")
MORE = zoo.VOCAB + 9


def resized(model: Any, size: int) -> Any:
    model.resize_token_embeddings(size, mean_resizing=False)
    return model


@pytest.mark.parametrize("spec", ["lora", "mam", "weights"])
@pytest.mark.parametrize("name", NAMES)
def test_more_and_fewer_tokens(name: str, spec: str) -> None:
    """Old tokens keep their logits. New ones can be read and trained on. The base keeps them after
    `remove`.
    """
    model = compiled(name, spec)
    inputs = model_inputs(name, model)
    inputs.pop("labels")
    want = model(**inputs).logits
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    resized(model, MORE)
    logits = model(**inputs).logits
    assert logits.shape[-1] == MORE == model.config.vocab_size
    assert (logits[..., : zoo.VOCAB] - want).abs().max() < 1e-10
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    fresh = {**inputs, "input_ids": inputs["input_ids"].clone()}
    fresh["input_ids"][:, -1] = MORE - 1
    assert model(**fresh).logits.isfinite().all()
    before = {k: v.clone() for k, v in peftc.parameters(model).items()}
    labelled = {**fresh, "labels": model_inputs(name, model)["labels"]}
    train(model, [labelled])
    assert any(not torch.equal(v, before[k]) for k, v in peftc.parameters(model).items())
    resized(model, zoo.VOCAB)
    assert model(**inputs).logits.shape == want.shape


@pytest.mark.parametrize("spec", ["lora", "mam", "weights"])
@pytest.mark.parametrize("name", NAMES)
def test_remove_restores_the_resized_base(name: str, spec: str) -> None:
    model, base = compiled(name, spec), zoo.build(name, torch.float64)
    flags = {n: p.requires_grad for n, p in base.named_parameters()}
    for m in (model, base):
        torch.manual_seed(4)  # of the new rows
        resized(m, MORE)
    peftc.remove(model)
    assert same(state(model), state(base))
    inputs = model_inputs(name, model)
    assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert [type(m) for m in model.modules()] == [type(m) for m in base.modules()]


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_fits_the_first_base(name: str, tmp_path: Any) -> None:
    """Edits do not depend on the vocabulary, but another vocabulary is another base, which is
    refused.
    """
    model = resized(compiled(name, "lora"), MORE)
    peftc.save(model, tmp_path / "adapter")
    with pytest.raises(peftc.PeftcError, match="P523"):
        peftc.load(tmp_path / "adapter", zoo.build(name, torch.float64))
    base = resized(zoo.build(name, torch.float64), MORE)
    with torch.no_grad():
        for key, value in peftc.remove(model).state_dict().items():
            base.state_dict()[key].copy_(value)
    again = peftc.load(tmp_path / "adapter", base)
    assert len(peftc.parameters(again)) > 0


@pytest.mark.parametrize("name", ["bart", "t5", "llama", "bert"])
@pytest.mark.parametrize("size", [MORE, zoo.VOCAB - 9], ids=["more", "fewer"])
def test_trained_rows_are_restored(name: str, size: int) -> None:
    """`train` of an embedding that was resized later: rows that existed before get their old values
    back.
    """
    model, base = (zoo.build(name, torch.float64) for _ in range(2))
    peftc.compile("peft 1\ntrain e = [w] at embed", model, seed=0)
    for m in (model, base):
        torch.manual_seed(4)
        resized(m, size)
    assert peftc.parameters(model)["e/" + embedding(model)] is model.get_input_embeddings().weight
    inputs = model_inputs(name, model)
    inputs = {k: v.clamp(max=size - 1) if v.dtype == torch.long else v for k, v in inputs.items()}
    want = base(**inputs).logits
    train(model, [inputs])
    assert not torch.equal(model(**inputs).logits, want)
    rows = min(size, zoo.VOCAB)  # new rows have no old values
    last = state(peftc.remove(model))
    for key, value in state(base).items():
        if "cls.predictions" not in key:  # BERT gets a new bias, which learns
            assert torch.equal(
                last[key][:rows] if len(value) == size else last[key], value[:rows] if len(value) == size else value
            ), key


def embedding(model: Any) -> str:
    return next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_edited_embedding(name: str) -> None:
    """transformers keeps the module and replaces its weight: the edit keeps acting."""
    spec = "peft 1\nedit e at embed { h += adapter(h, r=2, act=gelu) }"
    model = peftc.compile(spec, zoo.build(name, torch.float64), seed=0)
    randomise(peftc.parameters(model))
    inputs = model_inputs(name, model)
    inputs.pop("labels")
    want, plain = model(**inputs).logits, zoo.build(name, torch.float64)(**inputs).logits
    assert not torch.equal(want, plain)
    got = resized(model, MORE)(**inputs).logits
    assert (got[..., : zoo.VOCAB] - want).abs().max() < 1e-10
    again = peftc.remove(model)(**inputs).logits
    assert (again[..., : zoo.VOCAB] - plain).abs().max() < 1e-10
