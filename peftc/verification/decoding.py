"""Decoding with a cache and without one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from peftc.concurrency.interrupts import shielded
from peftc.models.configs import error_summary
from peftc.planning import ir
from peftc.verification.batches import Batch
from peftc.verification.checks import Results
from peftc.verification.trial import EVALUATION, Broken, Trial, passes
from peftc.verification.witness.locations import Unreachable
from peftc.verification.witness.outputs import Difference, difference

NEW = 3  # tokens
Steps = tuple[Tensor, tuple[Tensor, ...]]  # tokens (batch, length), and the logits of each that is new
TAKEN = ("input_ids", "attention_mask", "inputs_embeds")


def check_decoding(trial: Trial, batch: Batch, done: Results) -> None:
    """A few tokens, greedily: with a cache as without one, and both as the equations say.

    A form that looks at all tokens of a call is another function with a cache; where the equations differ, the model may.
    """
    name = "decoding with a cache equals decoding without"
    if not generates(trial.base, batch):
        done.skip(name, "the model does not generate from this batch")
        return
    with trial.tasked(), EVALUATION.of(trial.copy), done.attempt(name, "P610"):
        cached, plain = (decoded(trial, batch, cache) for cache in (True, False))
        apart = compared(plain, cached)
        if trial.unreached or trial.witness.prompts:
            if apart is not None and looks_at_all(trial):
                done.skip(name, "a form looks at all tokens of a call, and nothing says what it should be with a cache")
            elif (
                apart is not None and compared(*(own_steps(trial, batch, cache) for cache in (False, True))) is not None
            ):
                done.skip(name, "the model without its edits computes something else with a cache")
            else:
                done.equal(name, "P610", "decoding with a cache", apart)
            return
        wrong = compared(expected(trial, batch, cache=True), cached)
        if wrong is None and apart is not None:
            wrong = compared(expected(trial, batch, cache=False), plain)
            name = f"{name}, but for forms that look at all tokens of a call"
        done.equal(name, "P610", "in decoding", wrong)


def looks_at_all(trial: Trial) -> bool:
    """Whether an equation has a number for each example, which is made of all tokens of a call."""
    terms = (
        term for placed in trial.record.site_edits for assign in placed.assigns for term in ir.subterms(assign.value)
    )
    return any(getattr(term.shape, "per_example", False) for term in terms)


def expected(trial: Trial, batch: Batch, cache: bool) -> Steps:
    """What the base generates while it computes the equations."""
    with EVALUATION.of(trial.base), trial.witness.acting():
        return own_steps(trial, batch, cache)


def decoded(trial: Trial, batch: Batch, cache: bool) -> Steps:
    """What the copy generates. Raises: Unreachable where the base does not generate in this way; Broken where it does, alone."""
    try:
        return steps(trial.copy, batch, cache)
    except Exception as error:  # whatever the model's own code raises
        if passes(error):
            raise
        own_steps(trial, batch, cache)
        raise Broken(f"the compiled model raises {error_summary(error)}") from error


def own_steps(trial: Trial, batch: Batch, cache: bool) -> Steps:
    """What the base generates. Raises: Unreachable."""
    try:
        return steps(trial.base, batch, cache)
    except Exception as error:  # whatever the model's own code raises
        if passes(error):
            raise
        raise Unreachable(f"the model does not generate so: {error_summary(error)}") from error


def generates(model: nn.Module, batch: Batch) -> bool:
    can: Any = getattr(model, "can_generate", lambda: False)
    return bool(can()) and isinstance(batch.get("input_ids"), Tensor)


@torch.no_grad()
def steps(model: Any, batch: Batch, cache: bool) -> Steps:
    """The tokens of a greedy decoding, and the logits of each step."""
    given = {name: batch[name] for name in TAKEN if name in batch}
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "output_logits": True}
    pad = getattr(model.config, "pad_token_id", None)
    options |= {"return_dict_in_generate": True, "pad_token_id": 0 if pad is None else pad}
    with quiet():
        made = model.generate(**given, **options, use_cache=cache)
    return made.sequences, tuple(made.logits)


def compared(first: Steps, second: Steps) -> Difference | None:
    """The first step whose logits differ; steps behind another token are another input."""
    for i, (a, b) in enumerate(zip(first[1], second[1], strict=False)):
        found = difference({f"logits of token {i}": a}, {f"logits of token {i}": b})
        if found is not None or not torch.equal(a.argmax(-1), b.argmax(-1)):
            return found
    return None


@shielded
def quiet() -> Generator[None]:
    """Inside the block, nothing is said of generation settings."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
