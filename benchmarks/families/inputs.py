"""The arguments of one forward, from a model's main input and its configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.families.pairs import Pair
from benchmarks.families.shrink import FIRST_FREE, LAST_FREE

BATCH, TOKENS, DECODER_TOKENS = 2, 8, 6


def inputs_for(model: nn.Module, pair: Pair, seed: int) -> dict[str, Any]:
    """Token ids of text (never padding or an image), pixels, or sound."""
    generator = torch.Generator().manual_seed(seed)
    main = model.main_input_name
    config = model.config
    accepted = inspect.signature(model.forward).parameters
    if pair.mapping in ("causal-lm", "image-text-to-text", "masked-lm") and "input_ids" in accepted:
        main = "input_ids"
    inputs = {main: (_PERCEIVED[pair.mapping] if main == "inputs" else _MAKERS[main])(config, generator)}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _ids(config, generator, DECODER_TOKENS)
    for name in EXTRA.get(pair.type, ()):
        if name in accepted:
            inputs[name] = _EXTRAS[name](config, generator)
    if pair.type in ("idefics", "pi0"):  # several images for a text
        inputs["pixel_values"] = inputs["pixel_values"][:, None]
    return inputs


def _ids(config: Any, generator: torch.Generator, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(FIRST_FREE, LAST_FREE, (BATCH, tokens), generator=generator)


def _pixels(config: Any, generator: torch.Generator) -> torch.Tensor:
    config = getattr(config, "vlm_config", config)
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    if getattr(vision, "num_patches", None) and not hasattr(vision, "image_size"):  # an image as its patches
        return torch.randn(BATCH, vision.num_patches, 3 * vision.patch_size**2, generator=generator)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return torch.randn(BATCH, getattr(vision, "num_channels", 3), height, width, generator=generator)


def _features(config: Any, generator: torch.Generator) -> torch.Tensor:
    if hasattr(config, "max_source_positions") and hasattr(
        config, "num_mel_bins"
    ):  # a log-mel spectrogram that two convolutions halve once
        return torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    width = getattr(config, "feature_projection_input_dim", None) or getattr(config, "num_mel_bins", 80)
    return torch.randn(BATCH, 24, width, generator=generator)


def _sound(config: Any, generator: torch.Generator) -> torch.Tensor:
    if hasattr(config, "num_mel_bins"):  # a spectrogram as an image
        return torch.randn(BATCH, config.max_length, config.num_mel_bins, generator=generator)
    return torch.randn(BATCH, 6_400, generator=generator)


_MAKERS: Mapping[str, Callable[[Any, torch.Generator], torch.Tensor]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _sound,
    "flattened_patches": lambda config, generator: _patches(config, generator),
}
_PERCEIVED = {"masked-lm": _ids, "image-classification": _pixels}


def _boxes(config: Any, generator: torch.Generator) -> torch.Tensor:
    corners = torch.rand(BATCH, TOKENS, 2, generator=generator) * 0.5
    return torch.cat([corners, corners + 0.4], dim=-1)


def _patches(config: Any, generator: torch.Generator) -> torch.Tensor:
    # Each patch with its row and column.
    patches = torch.randn(BATCH, 6, config.vision_config.patch_embed_hidden_size, generator=generator)
    return torch.cat([torch.arange(1.0, 7.0).repeat(BATCH, 1)[..., None].expand(-1, -1, 2), patches], dim=-1)


def _patch_mask(config: Any) -> torch.Tensor:
    """Which patches there are; of a model that acts, which cameras."""
    return torch.ones(BATCH, 1).bool() if hasattr(config, "vlm_config") else torch.ones(BATCH, 16, dtype=torch.long)


def _speech(config: Any, generator: torch.Generator) -> torch.Tensor:
    # As long as the text: a convolution halves it, a projection joins a few frames to one.
    frames = 2 * TOKENS * config.downsample_factor
    return torch.randn(BATCH, config.audio_config.num_mel_bins, frames, generator=generator)


def _image_places(config: Any, generator: torch.Generator) -> torch.Tensor:
    return (torch.arange(TOKENS) < config.latent_query_num).long().repeat(BATCH, 1)


_EXTRAS: Mapping[str, Callable[[Any, torch.Generator], torch.Tensor]] = {
    "image_attention_mask": lambda config, generator: torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
    "pixel_attention_mask": lambda config, generator: _patch_mask(config),
    "spatial_shapes": lambda config, generator: torch.full((BATCH, 2), 4),
    "pixel_values": _pixels,
    "qformer_input_ids": _ids,
    "bbox": _boxes,
    "input_features": lambda config, generator: _speech(config, generator),
    "image_embeds_position_mask": _image_places,
    "state": lambda config, generator: torch.randn(BATCH, config.max_state_dim, generator=generator),
}
# Arguments that a model requires even on its text path.
EXTRA: Mapping[str, tuple[str, ...]] = {
    "blip": ("pixel_values",),
    "voxtral_realtime": ("input_features",),
    "udop": ("bbox", "pixel_values"),
    "kosmos-2": ("pixel_values", "image_embeds_position_mask"),
    "instructblip": ("qformer_input_ids",),
    "instructblipvideo": ("qformer_input_ids",),
    "idefics": ("pixel_values", "image_attention_mask"),
    "pi0": ("state", "pixel_values", "pixel_attention_mask"),
    "siglip2": ("pixel_attention_mask", "spatial_shapes"),
}
