"""Calls that run the parts of a model which its plain sample leaves alone: towers for images and for sound.

A text alone does not reach the layers for images. The model is called with an image as well, in each of the shapes that
images come in; then its own functions for the features of an image; then each part that is a model of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from peftc.diagnostics import PeftcError
from peftc.models.media import BATCH, MEDIA, TOKENS, Medium
from peftc.models.sample import sample_inputs

R = TypeVar("R")


@dataclass(frozen=True)
class TowerCall:
    """One call, and what it brings in: `vision`, `audio` or `text`."""

    modality: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.arguments)


def run_on_sample(
    model: nn.Module, sample: Mapping[str, Any] | None, run: Callable[[Mapping[str, Any]], R]
) -> tuple[Mapping[str, Any], R]:
    """`run` of the sample, else of inputs made for the model, else of those with a medium; and what it ran on.

    Raises: what running the plain inputs raises, where no others can be run.
    """
    if sample is not None:
        return sample, run(sample)
    plain: Mapping[str, Any] = {}
    try:
        plain = sample_inputs(model)
        return plain, run(plain)
    except Exception as error:
        if isinstance(error, PeftcError) and error.diagnostics[0].code != "P507":
            raise
        for call in model_calls(model, plain):
            try:
                return call.arguments, run(call.arguments)
            except PeftcError:
                raise
            except Exception:  # the model does not take this, either
                continue
        raise


def tower_calls(model: nn.Module, sample: Mapping[str, Any], unseen: Callable[[str], bool]) -> Iterator[TowerCall]:
    """Calls to try, the most telling first. `unseen(name)`: whether a module has layers that no call has reached yet."""
    yield from model_calls(model, sample)
    for medium in MEDIA:
        for owner in (model, getattr(model, "base_model", model)):
            getter = getattr(owner, f"get_{medium.feature}_features", None)
            if getter is not None:
                yield from _calls(getter, model, medium, {})
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and unseen(name):
            yield from _alone(part)


def model_calls(model: nn.Module, sample: Mapping[str, Any]) -> Iterator[TowerCall]:
    """Calls of the model itself: on a text as well, and on each medium."""
    accepted = inspect.signature(model.forward).parameters
    text = {n: torch.ones(BATCH, TOKENS, dtype=torch.long) for n in ("input_ids",) if n in accepted}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        text["decoder_input_ids"] = torch.ones(BATCH, TOKENS, dtype=torch.long)
    for medium in MEDIA:
        yield from _calls(model.forward, model, medium, {**text, **sample})


def _calls(
    function: Callable[..., Any], model: nn.Module, medium: Medium, beside: Mapping[str, Any]
) -> Iterator[TowerCall]:
    accepted = inspect.signature(function).parameters
    for made in medium.shapes(model, accepted):
        yield TowerCall(medium.word, function, {**beside, **made})


def _alone(part: PreTrainedModel) -> Iterator[TowerCall]:
    """A part by itself: on ids where it reads text, else on whatever medium its forward takes."""
    accepted = inspect.signature(part.forward).parameters
    for medium in MEDIA:
        if medium.reads(part, next(iter(accepted), None)):
            for made in medium.shapes(part, accepted, part.main_input_name):
                yield TowerCall(medium.word, part.forward, made)
    if "input_ids" in accepted:
        yield TowerCall("text", part.forward, {"input_ids": torch.ones(BATCH, TOKENS, dtype=torch.long)})
