"""An image before the text for multimodal models: pixels of the right shape, and as many image
tokens as the encoder returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.families.forward import finite, main_output, run

_TOKENS = ("image_token_id", "image_token_index", "image_patch_id", "video_token_index")
_SIDE = 4  # patches on each side of an image given as a list of patches


def with_image(model: nn.Module, inputs: Mapping[str, Any], generator: torch.Generator) -> dict[str, Any]:
    """`inputs` with an image that changes the output; unchanged if no shape of pixels works."""
    for make in (_square, _unsized, _grid, _tiles, _plain):
        try:
            candidate = make(model, dict(inputs), generator)
            if candidate and _matters(model, candidate):
                return candidate
        except Exception:  # a model that expects another shape raises
            continue
    return dict(inputs)


def _matters(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    output = run(model, inputs)
    other = run(model, {**inputs, "pixel_values": inputs["pixel_values"] + 1.0 + inputs["pixel_values"].flip(-1)})
    return finite(output) and not torch.equal(main_output(output), main_output(other))


def _square(model: nn.Module, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any] | None:
    """(batch, channels, side, side)"""
    pixels = _pixels(model, generator)
    return _with_image_tokens(model, inputs, {"pixel_values": pixels, **_sizes(model, pixels)})


def _unsized(model: nn.Module, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any] | None:
    """(batch, channels, side, side) without sizes, which only some encoders accept"""
    return _with_image_tokens(model, inputs, {"pixel_values": _pixels(model, generator)})


def _tiles(model: nn.Module, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any] | None:
    """(batch, tiles, channels, side, side), for encoders that tile images"""
    pixels = _pixels(model, generator)[:, None]
    return _with_image_tokens(model, inputs, {"pixel_values": pixels, **_sizes(model, pixels)})


def _plain(model: nn.Module, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any] | None:
    """An image without tokens of its own."""
    return {**inputs, "pixel_values": _pixels(model, generator)} if "pixel_values" in _accepted(model) else None


def _grid(model: nn.Module, inputs: dict[str, Any], generator: torch.Generator) -> dict[str, Any] | None:
    """(patches, channels · time · patch · patch), with the grid of the patches"""
    if "image_grid_thw" not in _accepted(model):
        return None
    vision = model.config.vision_config
    batch = inputs["input_ids"].shape[0]
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    pixels = torch.randn(batch * _SIDE**2, width, generator=generator)
    grid = torch.tensor([[1, _SIDE, _SIDE]] * batch)
    return _with_image_tokens(model, inputs, {"pixel_values": pixels, "image_grid_thw": grid})


def _with_image_tokens(model: nn.Module, inputs: dict[str, Any], image: dict[str, Any]) -> dict[str, Any] | None:
    """The text after as many image tokens as the image features have rows."""
    token = next((t for t in (getattr(model.config, name, None) for name in _TOKENS) if isinstance(t, int)), None)
    if token is None:
        return None
    batch = inputs["input_ids"].shape[0]
    features = _getter(model)
    accepted = inspect.signature(features).parameters
    with torch.no_grad():
        out = features(
            **{name: v for name, v in {**inputs, **image}.items() if name in accepted and name != "input_ids"}
        )
    rows = sum(t.shape[:-1].numel() for t in _rows(getattr(out, "pooler_output", out)))
    places = torch.full((batch, rows // batch), token)
    ids = torch.cat([places, inputs["input_ids"]], dim=1)
    kinds = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in _accepted(model) else {}
    return {**inputs, "input_ids": ids, **image, **kinds}


def _getter(model: nn.Module) -> Callable[..., Any]:
    """The model's own function for image features, or else for video features."""
    owners = (model, getattr(model, "model", None))
    names = ("get_image_features", "get_video_features")
    return next(method for name in names for owner in owners if (method := getattr(owner, name, None)) is not None)


def _rows(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _rows(inner)


def _pixels(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    vision = getattr(model.config, "vision_config", None) or model.config
    size = vision.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(2, getattr(vision, "num_channels", 3), height, width, generator=generator)


def _sizes(model: nn.Module, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    if "image_sizes" not in _accepted(model):
        return {}
    return {"image_sizes": torch.tensor([list(pixels.shape[-2:])] * pixels.shape[0])}


def _accepted(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters
