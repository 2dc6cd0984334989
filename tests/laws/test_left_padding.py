"""Rows that are padded on the left: where the base gives what the row alone gives, an edited model
does too.
"""

from __future__ import annotations

import copy
from functools import cache
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

import peftc
from peftc.runtime.prompts import extend_positions
from tests import zoo
from tests.laws.harness import randomise

PROMPT = "edit p at {}embed {{ h = concat(prompt(len=3), h) }}"
PREFIX = "edit p at {}layer[*].attn {{ kv = concat(prefix(len=3), kv) }}"
SLIDING = "mistral, sliding"
TOKENS, LACKING = 12, 5  # of the longer row, and how many the shorter has less: more than the window
BY_COLUMN = ("bart", "mbart")  # the base itself counts the positions of padding
NAMES = tuple(name for name in (*zoo.ALL, SLIDING) if name not in ("bert-base", "bert-classifier", *BY_COLUMN))
GENERATING = ("t5", "gpt2", "llama", "opt", SLIDING)


@cache
def base(name: str) -> Any:
    if name == SLIDING:
        return zoo.build("mistral", torch.float64, sliding_window=6, eos_token_id=None)
    return zoo.build(name, torch.float64, eos_token_id=None)


def edited(name: str, spec: str) -> Any:
    stack = "encoder." if base(name).config.is_encoder_decoder else ""
    model = peftc.compile("peft 1\n" + spec.format(stack), copy.deepcopy(base(name)), seed=0)
    randomise(peftc.parameters(model))
    return model.eval()


def rows(name: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A batch of two rows, the second padded on the left; and each row alone."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(zoo.EOS + 1, zoo.VOCAB, (2, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :LACKING] = 0
    ids[1, :LACKING] = zoo.PAD
    rest = {}
    if base(name).config.is_encoder_decoder:
        rest = {"decoder_input_ids": torch.randint(zoo.EOS + 1, zoo.VOCAB, (2, 4), generator=generator)}
    together = {"input_ids": ids, "attention_mask": mask, **rest}
    alone = [{"input_ids": ids[i : i + 1, start:], **{k: v[i : i + 1] for k, v in rest.items()}} for i, start in STARTS]
    return together, alone


STARTS = ((0, 0), (1, LACKING))


@torch.no_grad()
def difference(model: Any, name: str, numbered: bool) -> float:
    """Between the rows of a batch and each row alone, where its tokens are. `numbered`: with
    positions that count its tokens.
    """
    together, alone = rows(name)
    if numbered:
        together["position_ids"] = (together["attention_mask"].cumsum(1) - 1).clamp(min=0)
    whole = model(**together).logits
    parts = [model(**row).logits for row in alone]
    return max(float((whole[i, -part.shape[1] :] - part[0]).abs().max()) for i, part in enumerate(parts))


def ways(name: str) -> list[tuple[bool, float]]:
    """The ways to say where the tokens of a row are in which the base gives what it gives of the
    row alone; and how nearly, since rotations are computed in float32.
    """
    takes = "position_ids" in signature(type(base(name)).forward).parameters
    found = [(numbered, difference(base(name), name, numbered)) for numbered in ((False, True) if takes else (False,))]
    return [(numbered, 1e-10 if apart < 1e-10 else 1e-4) for numbered, apart in found if apart < 1e-5]


@pytest.mark.parametrize("spec", [PROMPT, PREFIX], ids=["prompt", "prefix"])
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_row_is_the_row_alone(name: str, spec: str) -> None:
    """A prefix has no position: it is as far from a token as that token's number says, which must
    be told.
    """
    model, found = edited(name, spec), ways(name)
    assert any(limit == 1e-10 for _, limit in found)
    if spec == PREFIX:
        found = [(numbered, limit) for numbered, limit in found if limit == 1e-10]
    for numbered, limit in found:
        assert difference(model, name, numbered) < limit


def continuations(name: str, model: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    together, alone = rows(name)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    given = [{k: v for k, v in row.items() if k != "decoder_input_ids"} for row in (together, *alone)]
    given = [{**row, "attention_mask": row.get("attention_mask", torch.ones_like(row["input_ids"]))} for row in given]
    first, *rest = (model.generate(**row, **options)[:, -8:] for row in given)
    return first, rest


@pytest.mark.parametrize(
    ("name", "spec"),
    [*((name, PROMPT) for name in GENERATING), ("t5", PREFIX), (SLIDING, PREFIX)],
    ids=[*(f"{name}-prompt" for name in GENERATING), "t5-prefix", f"{SLIDING}-prefix"],
)
def test_generation_of_a_padded_row_is_that_of_the_row_alone(name: str, spec: str) -> None:
    model = edited(name, spec)
    for options in ({"use_cache": True}, {"use_cache": False}, {"num_beams": 3}):
        plain, parts = continuations(name, base(name), **options)
        assert torch.equal(plain, torch.cat(parts))
        found, alone = continuations(name, model, **options)
        assert torch.equal(found, torch.cat(alone))
        assert not torch.equal(found, plain)


def test_a_row_that_begins_behind_padding_in_a_cache_is_refused() -> None:
    model, (together, _) = edited("llama", PROMPT).requires_grad_(False), rows("llama")
    ids, mask = together["input_ids"], together["attention_mask"]
    whole = model(**together).logits
    for cut in (LACKING, LACKING + 1):
        cache = model(ids[:, :cut], attention_mask=mask[:, :cut], use_cache=True).past_key_values
        rest: dict[str, Any] = {"input_ids": ids[:, cut:], "attention_mask": mask, "past_key_values": cache}
        if cut > LACKING:
            assert float((model(**rest).logits - whole[:, cut:]).abs().max()) < 1e-10
            continue
        with pytest.raises(peftc.PeftcError, match="P428"):
            model(**rest)


@pytest.mark.parametrize("name", ["llama", SLIDING])
def test_a_prompt_as_a_state_stands_before_the_first_token(name: str) -> None:
    """Folded out of the model, embedded tokens are where they were."""
    model, (together, _) = edited(name, PROMPT), rows(name)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(**together, **options)[:, TOKENS:]
    state = peftc.fold(model, into="state")
    assert torch.equal(model.generate(**state.inputs(**together), **options), want)


def test_positions_that_are_told_go_on_from_row_to_token() -> None:
    """Several numbers a token, numbers for all rows at once, and numbers that do not begin at 0."""
    starts = torch.tensor([[0], [2]])
    numbers = torch.tensor([[7, 8, 9, 10]])
    want = torch.tensor([[7, 8, 9, 10, 11, 12], [9, 10, 9, 10, 11, 12]])
    assert torch.equal(extend_positions(numbers, 2, starts), want)
    assert torch.equal(extend_positions(numbers.expand(3, 2, -1), 2, starts), want.expand(3, 2, -1))
    assert torch.equal(extend_positions(torch.arange(4), 2, starts), torch.arange(6))
