"""The smallest inputs that make a skeleton run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_mode

BATCH, TOKENS, DECODER_TOKENS = 2, 5, 4


def sample_inputs(model: nn.Module) -> dict[str, Any]:
    """Fake inputs for a skeleton's forward, made from its `main_input_name` and its config.

    There is no mask: transformers reads a mask's data, and a fake tensor has none.
    Raises: P507 if the main input is of an unknown kind; the caller must then give a sample.
    """
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    make = _MAKERS.get(name) if config is not None and isinstance(name, str) else None
    if make is None or not isinstance(name, str):
        reason = f"its main input is `{name}`" if isinstance(name, str) else "it has no `main_input_name`"
        notes = (reason, f"known inputs: {', '.join(_MAKERS)}")
        message = f"no sample input can be made for {type(model).__name__}"
        raise PeftcError(Diagnostic("P507", message, notes=notes, help="give a sample: `sample={name: tensor}`"))
    parameters = inspect.signature(model.forward).parameters
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with fake_mode(model), torch.device(device):
        inputs: dict[str, Any] = {name: make(config)}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = token_ids(DECODER_TOKENS)
    dtype = floating_dtype(model)
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def token_ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.ones(BATCH, tokens, dtype=torch.long)


def floating_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(BATCH, getattr(vision, "num_channels", 3), height, width)


_MAKERS: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": lambda config: token_ids(),
    "pixel_values": _pixels,
    "input_features": lambda config: torch.zeros(BATCH, config.num_mel_bins, 2 * config.max_source_positions),
    "input_values": lambda config: torch.zeros(BATCH, 16_000),
}
