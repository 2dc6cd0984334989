"""Calls that run the towers of a model, which a sample of text does not reach.

The model is called with an image or a sound in each shape that models take; then its functions
for the features of a medium; then each submodule that is a model itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from peftc.diagnostics import PeftcError
from peftc.models.media import MEDIA, Medium
from peftc.models.sample import sample_inputs, token_ids

R = TypeVar("R")


@dataclass(frozen=True)
class TowerCall:
    """One call. `modality`: `vision`, `audio` or `text`."""

    modality: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.arguments)


def run_on_sample(
    model: nn.Module, sample: Mapping[str, Any] | None, run: Callable[[Mapping[str, Any]], R]
) -> tuple[Mapping[str, Any], R]:
    """Runs on `sample`, else on inputs made for the model, if need be with a medium.

    Raises: what running the plain inputs raises, if none of the others run.
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
        for call in _model_calls(model, plain):
            try:
                return call.arguments, run(call.arguments)
            except PeftcError:
                raise
            except Exception:  # the model does not take this form either
                continue
        raise


def tower_calls(
    model: nn.Module, sample: Mapping[str, Any], has_unreached_layers: Callable[[str], bool]
) -> Iterator[TowerCall]:
    """Calls to try, those of the whole model first."""
    yield from _model_calls(model, sample)
    for medium in MEDIA:
        for owner in (model, getattr(model, "base_model", model)):
            getter = getattr(owner, f"get_{medium.feature}_features", None)
            if getter is not None:
                yield from _medium_calls(getter, model, medium, {})
    for name, tower in model.named_modules():
        if name and isinstance(tower, PreTrainedModel) and has_unreached_layers(name):
            yield from _calls_of(tower)


def _model_calls(model: nn.Module, sample: Mapping[str, Any]) -> Iterator[TowerCall]:
    parameters = inspect.signature(model.forward).parameters
    text = {"input_ids": token_ids()} if "input_ids" in parameters else {}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        text["decoder_input_ids"] = token_ids()
    for medium in MEDIA:
        yield from _medium_calls(model.forward, model, medium, {**text, **sample})


def _medium_calls(
    function: Callable[..., Any], model: nn.Module, medium: Medium, others: Mapping[str, Any]
) -> Iterator[TowerCall]:
    for inputs in medium.inputs(model, inspect.signature(function).parameters):
        yield TowerCall(medium.modality, function, {**others, **inputs})


def _calls_of(tower: PreTrainedModel) -> Iterator[TowerCall]:
    parameters = inspect.signature(tower.forward).parameters
    for medium in MEDIA:
        if medium.is_input_of(tower, next(iter(parameters), None)):
            for inputs in medium.inputs(tower, parameters, any_name=True):
                yield TowerCall(medium.modality, tower.forward, inputs)
    if "input_ids" in parameters:
        yield TowerCall("text", tower.forward, {"input_ids": token_ids()})
