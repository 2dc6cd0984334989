"""Left-padded batches: wherever the base computes the same as for each row alone, so does the
edited model.
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
TOKENS, LACKING = 12, 5  # tokens of the longer row, and how many fewer the shorter has: more than the window
BY_COLUMN = ("bart", "mbart")  # the base itself gives positions to padding
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
    """A batch of two rows, the second padded on the left, and each row alone."""
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
    """The largest difference between the batch and each row alone, at unpadded tokens. `numbered`:
    with explicit `position_ids`.
    """
    together, alone = rows(name)
    if numbered:
        together["position_ids"] = (together["attention_mask"].cumsum(1) - 1).clamp(min=0)
    whole = model(**together).logits
    parts = [model(**row).logits for row in alone]
    return max(float((whole[i, -part.shape[1] :] - part[0]).abs().max()) for i, part in enumerate(parts))


def exact_position_modes(name: str) -> list[tuple[bool, float]]:
    """With which `position_ids` (explicit or not) the base gives the same for a padded row as for
    the row alone, and the tolerance: rotary embeddings are computed in float32.
    """
    takes = "position_ids" in signature(type(base(name)).forward).parameters
    differences = [
        (numbered, difference(base(name), name, numbered)) for numbered in ((False, True) if takes else (False,))
    ]
    return [(numbered, 1e-10 if gap < 1e-10 else 1e-4) for numbered, gap in differences if gap < 1e-5]


@pytest.mark.parametrize("spec", [PROMPT, PREFIX], ids=["prompt", "prefix"])
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_row_is_the_row_alone(name: str, spec: str) -> None:
    """A prefix has no position: its distance to a token is that token's position, so explicit
    positions are needed.
    """
    model, variants = edited(name, spec), exact_position_modes(name)
    assert any(limit == 1e-10 for _, limit in variants)
    if spec == PREFIX:
        variants = [(numbered, limit) for numbered, limit in variants if limit == 1e-10]
    for numbered, limit in variants:
        assert difference(model, name, numbered) < limit


def continuations(name: str, model: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
    together, alone = rows(name)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    calls = [{k: v for k, v in row.items() if k != "decoder_input_ids"} for row in (together, *alone)]
    calls = [{**row, "attention_mask": row.get("attention_mask", torch.ones_like(row["input_ids"]))} for row in calls]
    first, *rest = (model.generate(**row, **options)[:, -8:] for row in calls)
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
        rows_together, alone = continuations(name, model, **options)
        assert torch.equal(rows_together, torch.cat(alone))
        assert not torch.equal(rows_together, plain)


def test_a_row_with_only_padding_in_the_cache_is_refused() -> None:
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
def test_a_prompt_folded_into_a_state_precedes_the_first_token(name: str) -> None:
    """A prompt folded into a cache has the positions of the embedded rows."""
    model, (together, _) = edited(name, PROMPT), rows(name)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(**together, **options)[:, TOKENS:]
    state = peftc.fold(model, into="state")
    assert torch.equal(model.generate(**state.inputs(**together), **options), want)


def test_explicit_positions_are_extended_over_the_prompt() -> None:
    """For several positions a token, positions shared by all rows, and positions that do not start
    at 0.
    """
    starts = torch.tensor([[0], [2]])
    numbers = torch.tensor([[7, 8, 9, 10]])
    want = torch.tensor([[7, 8, 9, 10, 11, 12], [9, 10, 9, 10, 11, 12]])
    assert torch.equal(extend_positions(numbers, 2, starts), want)
    assert torch.equal(extend_positions(numbers.expand(3, 2, -1), 2, starts), want.expand(3, 2, -1))
    assert torch.equal(extend_positions(torch.arange(4), 2, starts), torch.arange(6))
