"""Warm starts: edits initialised from a saved adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import randomise

PROMPT = "peft 1\nedit tokens at embed { h = concat(prompt(len=3), h) }"
GROUP = "peft 1\nedit e at layer[*].attn { kv = concat(prefix(len=2, reparam=mlp(3), keep=true), kv) }"
ADAPTERS = "peft 1\nedit e at layer[*].ffn per task { h += adapter(h, r=2) }"


def compiled(spec: str, seed: int = 0, **options: Any) -> Any:
    return peftc.compile(spec, zoo.build("llama"), seed=seed, **options).eval()


def saved(spec: str, to: Path) -> Any:
    model = compiled(spec)
    randomise(peftc.parameters(model))
    peftc.save(model, to)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**zoo.inputs("llama", model)).logits


@pytest.mark.parametrize("spec", [PROMPT, GROUP], ids=["prompt", "group"])
def test_edits_of_the_same_name_or_of_another(spec: str, tmp_path: Path) -> None:
    first = saved(spec, tmp_path)
    second = compiled(spec, seed=1)
    assert not torch.equal(logits(second), logits(first))
    (name,) = peftc.warm_start(second, tmp_path)
    assert torch.equal(logits(second), logits(first))
    assert all(p.requires_grad for p in peftc.parameters(second).values())
    third = compiled(
        spec.replace(f"edit {name}", "edit mine") + "\nedit lora at layer[*].attn.q { h += lora(x, r=2) }", 1
    )
    assert peftc.warm_start(third, tmp_path, edits={"mine": name}) == ("mine",)
    assert torch.equal(logits(third), logits(first))  # LoRA starts at zero


def test_one_task_of_several(tmp_path: Path) -> None:
    first = saved(ADAPTERS.replace(" per task", ""), tmp_path)
    model = compiled(ADAPTERS, seed=1, tasks=("a", "b"))
    with pytest.raises(peftc.PeftcError, match=r"P525[^$]*name the task to initialize"):
        peftc.warm_start(model, tmp_path)
    with peftc.task(model, "a"):
        before = logits(model)
    peftc.warm_start(model, tmp_path, task="b")
    with peftc.task(model, "a"):
        assert torch.equal(logits(model), before)
    with peftc.task(model, "b"):
        assert torch.equal(logits(model), logits(first))


@pytest.mark.parametrize(
    ("spec", "options", "code", "message"),
    [
        (PROMPT.replace("len=3", "len=4"), {}, "P525", "[3, 32]"),
        (PROMPT.replace("len=3", "len=2"), {}, "P525", "does not fit `tokens` of the model"),
        (PROMPT.replace("prompt(len=3", "prompt(len=3, reparam=mlp(2)"), {}, "P525", "missing"),
        (PROMPT.replace("edit tokens", "edit other"), {}, "P532", "the adapter has `tokens`, the model `other`"),
        (PROMPT, {"edits": {"token": "tokens"}}, "P532", "the model has no edit `token`"),
        (PROMPT, {"edits": {"tokens": "soft"}}, "P532", "the adapter has no edit `soft`"),
        (PROMPT, {"task": "a"}, "P534", "`a`"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_and_the_model_is_unchanged(
    spec: str, options: dict[str, Any], code: str, message: str, tmp_path: Path
) -> None:
    saved(PROMPT, tmp_path)
    model = compiled(spec, seed=1)
    before = {key: p.detach().clone() for key, p in peftc.parameters(model).items()}
    with pytest.raises(peftc.PeftcError, match=code) as result:
        peftc.warm_start(model, tmp_path, **options)
    assert message in str(result.value)
    assert all(torch.equal(p, before[key]) for key, p in peftc.parameters(model).items())


def test_two_edits_start_from_one_adapter(tmp_path: Path) -> None:
    lora = "edit {} at layer[*].attn.q {{ h += lora(x, r=2) }}"
    first = saved(f"peft 1\n{lora.format('lora')}", tmp_path)
    model = compiled(f"peft 1\n{lora.format('a')}\n{lora.format('b')}", 1)
    assert peftc.warm_start(model, tmp_path, edits={"a": "lora", "b": "lora"}) == ("a", "b")
    expected, result = peftc.parameters(first), peftc.parameters(model)
    for key, value in expected.items():
        assert torch.equal(result[key.replace("lora", "a", 1)], value)
        assert torch.equal(result[key.replace("lora", "b", 1)], value)
