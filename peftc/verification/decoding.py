"""Compares greedy decoding with a cache to decoding without one, and both to the equations."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from peftc.concurrency.interrupts import shielded
from peftc.planning import ir
from peftc.verification.checks import CheckResults
from peftc.verification.comparison import Comparison, compiled_model_errors, unavailable_on_error
from peftc.verification.forward_modes import EVALUATION
from peftc.verification.preparation import Batch
from peftc.verification.reference.outputs import Difference, first_difference

NEW_TOKENS = 3
INPUTS = ("input_ids", "attention_mask", "inputs_embeds")
Logits = tuple[Tensor, ...]  # of each new token


def check_decoding(comparison: Comparison, results: CheckResults) -> None:
    """Decodes a few tokens. Where the equations differ with a cache, the model may, too."""
    name = "decoding with a cache equals decoding without"
    can_generate = getattr(comparison.base, "can_generate", None)
    if can_generate is None or not can_generate() or not isinstance(comparison.batch.get("input_ids"), Tensor):
        results.skip(name, "the model does not generate from this batch")
        return
    with comparison.selected_task(), EVALUATION.applied_to(comparison.compiled), results.attempt(name, "P610"):
        cached, plain = (decode_compiled(comparison, cache) for cache in (True, False))
        difference = logits_difference(plain, cached)
        if comparison.unavailable or comparison.reference.prompts:
            terms = (t for edit in comparison.record.site_edits for a in edit.assigns for t in ir.subterms(a.value))
            reads_all = any(getattr(term.shape, "per_example", False) for term in terms)  # a value for each example
            if difference is not None and reads_all:
                reason = "a form reads all tokens of a call, and the spec does not define its value with a cache"
                results.skip(name, reason)
            elif difference is not None and logits_difference(*(decode_base(comparison, c) for c in (False, True))):
                results.skip(name, "the model without its edits computes something else with a cache")
            else:
                results.compare(name, "P610", "decoding with a cache", difference)
            return
        fault = logits_difference(decode_reference(comparison, cache=True), cached)
        if fault is None and difference is not None:
            fault = logits_difference(decode_reference(comparison, cache=False), plain)
            name = f"{name}, except for forms that read all tokens of a call"
        results.compare(name, "P610", "in decoding", fault)


def decode_reference(comparison: Comparison, cache: bool) -> Logits:
    with EVALUATION.applied_to(comparison.base), comparison.reference.active():
        return decode_base(comparison, cache)


def decode_compiled(comparison: Comparison, cache: bool) -> Logits:
    with compiled_model_errors(lambda: decode_base(comparison, cache)):
        return decode(comparison.compiled, comparison.batch, cache)


def decode_base(comparison: Comparison, cache: bool) -> Logits:
    with unavailable_on_error("the model does not generate in this way: "):
        return decode(comparison.base, comparison.batch, cache)


@torch.no_grad()
def decode(model: Any, batch: Batch, cache: bool) -> Logits:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    pad = getattr(model.config, "pad_token_id", None)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "use_cache": cache}
    output = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0 if pad is None else pad}
    with without_generation_warnings():
        return tuple(model.generate(**inputs, **greedy, **output).logits)


def logits_difference(first: Logits, second: Logits) -> Difference | None:
    """The first step whose logits differ. After another token the steps have other inputs."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        difference = first_difference({f"logits of token {i}": a}, {f"logits of token {i}": b})
        if difference is not None or not torch.equal(a.argmax(-1), b.argmax(-1)):
            return difference
    return None


@shielded
def without_generation_warnings() -> Generator[None]:
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
