"""Layouts of hidden states: parts of a result, flattened tokens, images as tokens."""

import copy
from typing import Any

import torch


def replace_part(result: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested tuples, lists and dictionaries in which the part at `path` is `value`."""
    if not path:
        return value
    parts = copy.copy(result) if isinstance(result, dict) else list(result)
    parts[path[0]] = replace_part(parts[path[0]], path[1:], value)
    make: Any = getattr(type(result), "_make", tuple)  # of a named tuple
    return make(parts) if isinstance(result, tuple) else parts


def unflatten_tokens(value: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """(batch · tokens, d) as (batch, tokens, d), with batch and tokens of the layer's input."""
    return value.view(*stream.shape[:-1], value.shape[-1])


def image_to_tokens(image: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """An image, with features second if `channels_first`, as (batch, height · width, d)."""
    return image.flatten(2).transpose(1, 2) if channels_first else image.flatten(1, -2)


def tokens_to_image(tokens: torch.Tensor, image: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """(batch, height · width, d) in the shape of `image`."""
    return (tokens.transpose(1, 2) if channels_first else tokens).reshape(image.shape)
