"""What the configuration of a model says of the quantisation of its weights."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from peftc.models.sources import ModelSource

KEY = "quantization_config"


def quantization_of(source: ModelSource) -> dict[str, Any] | None:
    """The options of a quantisation; None if the weights have none."""
    options = next((own for config in _configs(source.config) if (own := getattr(config, KEY, None))), None)
    return None if options is None else dict(options) if isinstance(options, dict) else options.to_dict()


def without_quantization(source: ModelSource) -> ModelSource:
    config = deepcopy(source.config)
    for own in _configs(config):
        if hasattr(own, KEY):
            delattr(own, KEY)
    return replace(source, config=config)


def dense_dtype(source: ModelSource) -> torch.dtype | None:
    """Of the weights, as the configuration names it."""
    for config in _configs(source.config):
        dtype = getattr(config, "dtype", None)
        dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if isinstance(dtype, torch.dtype):
            return dtype
    return None


def _configs(config: Any) -> list[Any]:
    """A configuration, and that of its text model."""
    return list({id(own): own for own in (config, config.get_text_config())}.values())
