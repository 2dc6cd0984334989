"""Prefixes and prompts folded into a cache: the plain model then generates what the edited model
generated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import peftc
from tests import zoo
from tests.laws.harness import close, randomise

PREFIX = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=3), kv) }"
GROUPED = "peft 1\nedit p at layer[*].attn { kv = concat(prefix(len=1), prefix(len=2, reparam=mlp(4)), kv) }"
PROMPT = "peft 1\nedit p at embed { h = concat(prompt(len=3), h) }"


def compiled(name: str, spec: str) -> Any:
    model = peftc.compile(spec, zoo.build(name, torch.float64), seed=0).eval()
    randomise(peftc.parameters(model))
    return model


def ids_and_mask(model: Any, padded: bool) -> dict[str, torch.Tensor]:
    inputs = zoo.inputs("llama", model, padding="left" if padded else None)
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])),
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", [PREFIX, GROUPED, PROMPT], ids=["prefix", "grouped", "prompt"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_generation_is_unchanged(name: str, spec: str, padded: bool) -> None:
    model = compiled(name, spec)
    inputs = ids_and_mask(model, padded)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    want, beams = (model.generate(**inputs, **options, num_beams=n) for n in (1, 3))
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    logits = model(**inputs, position_ids=None if spec == PROMPT else positions).logits  # as `generate` counts them
    state = peftc.fold(model, into="state")
    assert state.folded == ("p",)
    assert state.refused == {}
    plain = zoo.build(name, torch.float64).eval()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    tokens = inputs["input_ids"].shape[1]
    got, more = (plain.generate(**state.inputs(**inputs, beams=n), **options, num_beams=n) for n in (1, 3))
    assert torch.equal(got[:, -6:], want[:, tokens:])
    assert torch.equal(more[:, -1], beams[:, -1])
    out = plain(**state.inputs(**inputs)).logits[:, -tokens:]
    attended = inputs["attention_mask"].bool()
    close(out[attended], logits[attended], "logits")


def test_the_other_edits_stay() -> None:
    model = compiled("llama", PREFIX + "\nedit q at layer[*].attn.q { h += lora(x, r=2) }")
    inputs = ids_and_mask(model, False)
    want = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    state = peftc.fold(model, into="state")
    assert list(state.refused) == ["q"]
    assert {key.partition("/")[0] for key in peftc.parameters(model)} == {"q"}
    got = model.generate(**state.inputs(**inputs), max_new_tokens=5, do_sample=False)
    assert torch.equal(got, want)


def test_a_prompt_of_an_encoder() -> None:
    model = compiled("bart", PROMPT.replace("embed", "encoder.embed"))
    inputs = ids_and_mask(model, False)
    want = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    state = peftc.fold(model, into="state")
    assert torch.equal(model.generate(**state.inputs(**inputs), max_new_tokens=5, do_sample=False), want)


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("bart", PREFIX, "encoder-decoder"),
        ("bert", PREFIX, "not every layer"),
        ("llama", PREFIX.replace("[*]", "[0]"), "not every layer"),
        ("llama", PREFIX.replace("prefix(len=3), kv", "kv, prefix(len=3)"), "more than"),
        ("llama", "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }", "more than"),
    ],
)
def test_refused(name: str, spec: str, reason: str) -> None:
    model = compiled(name, spec)
    before = model(**zoo.inputs(name, model)).logits
    with pytest.raises(peftc.PeftcError, match="P538") as excinfo:
        peftc.fold(model, into="state")
    assert reason in str(excinfo.value)
    assert torch.equal(model(**zoo.inputs(name, model)).logits, before)


@pytest.mark.parametrize(
    "options",
    [{"into": "nonsense"}, {"into": None}, {"into": "state", "widen": True}, {"into": "state", "dequantize": True}],
)
def test_into_is_weights_or_state(options: Any) -> None:
    """Folding into weights cannot be undone, so it must be requested explicitly."""
    model = compiled("llama", "peft 1\nedit q at layer[*].attn.q { h += lora(x, r=2) }")
    with pytest.raises(peftc.PeftcError, match="P545"):
        peftc.fold(model, **options)
    assert peftc.specs(model)


def test_the_cache_is_used_even_if_use_cache_is_off() -> None:
    model = compiled("llama", PREFIX)
    inputs = ids_and_mask(model, False)
    want = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    state = peftc.fold(model, into="state")
    model.generation_config.use_cache = model.config.use_cache = False
    got = model.generate(**state.inputs(**inputs), max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)
