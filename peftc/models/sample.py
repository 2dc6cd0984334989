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


def sample_inputs(model: nn.Module, *, cache: bool | None = None) -> dict[str, Any]:
    """Fake inputs for a skeleton's forward, made from its `main_input_name` and its config.

    No mask is among them: transformers reads a mask's data, and a fake tensor has none. `cache` sets `use_cache` where the
    forward takes it.

    Raises: P507 for a model whose input is of no known kind; its caller must give a sample.
    """
    config = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    make = _MAKERS.get(name) if config is not None and isinstance(name, str) else None
    if make is None or not isinstance(name, str):
        raise PeftcError(_no_sample(model, name))
    accepted = inspect.signature(model.forward).parameters
    with fake_mode(model), torch.device(_device(model)):
        given: dict[str, Any] = {name: make(config)}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
            given["decoder_input_ids"] = torch.ones(BATCH, DECODER_TOKENS, dtype=torch.long)
    if cache is not None and "use_cache" in accepted:
        given["use_cache"] = cache
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}


def _ids(config: Any) -> torch.Tensor:
    return torch.ones(BATCH, TOKENS, dtype=torch.long)


def _pixels(config: Any) -> torch.Tensor:
    vision = getattr(config, "vision_config", None) or config
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.zeros(BATCH, getattr(vision, "num_channels", 3), height, width)


def _features(config: Any) -> torch.Tensor:
    # A log-mel spectrogram; the encoder's two convolutions halve its length once.
    return torch.zeros(BATCH, config.num_mel_bins, 2 * config.max_source_positions)


def _waveform(config: Any) -> torch.Tensor:
    return torch.zeros(BATCH, 16_000)


_MAKERS: Mapping[str, Callable[[Any], torch.Tensor]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _waveform,
}


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _no_sample(model: nn.Module, name: object) -> Diagnostic:
    asked = f"its main input is `{name}`" if isinstance(name, str) else "it does not say what its input is"
    return Diagnostic(
        "P507",
        f"no sample input can be made for {type(model).__name__}",
        notes=(asked, f"known inputs: {', '.join(_MAKERS)}"),
        help="give one: `sample={name: tensor}`",
    )
