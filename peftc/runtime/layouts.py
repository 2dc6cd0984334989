"""Layouts of hidden states: parts of a result, flattened tokens, images as tokens."""

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn import functional as F


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


def features_last(value: torch.Tensor, tokens: tuple[int, ...], features: tuple[int, ...]) -> torch.Tensor:
    """A value with its features in one dimension, the last: (batch, heads, tokens, d_head) with
    `tokens` (0, 2) and `features` (1, 3) as (batch, tokens, heads · d_head).
    """
    ones = [dim for dim in range(value.ndim) if dim not in (*tokens, *features)]
    return value.permute(*tokens, *features, *ones).flatten(len(tokens))


def as_before(new: torch.Tensor, value: torch.Tensor, tokens: tuple[int, ...], features: tuple[int, ...]) -> Any:
    """The inverse of `features_last`, in the shape of `value`."""
    order = [*tokens, *features, *(dim for dim in range(value.ndim) if dim not in (*tokens, *features))]
    new = new.reshape([value.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(value.ndim)])
    return _stored_as(value, new)


def _stored_as(value: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`new`, contiguous where `value` is: code behind it may take a view."""
    # Seen in: no transformers model, but guided diffusion (`qkv.chunk(3, dim=1)`, then a view)
    return new.contiguous() if value.is_contiguous() else new


def image_to_tokens(image: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """An image, with features second if `channels_first`, as (batch, height · width, d)."""
    return image.flatten(2).transpose(1, 2) if channels_first else image.flatten(1, -2)


def tokens_to_image(tokens: torch.Tensor, image: torch.Tensor, channels_first: bool) -> torch.Tensor:
    """(batch, height · width, d) in the shape of `image`."""
    return _stored_as(image, (tokens.transpose(1, 2) if channels_first else tokens).reshape(image.shape))


def image_patches(
    image: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
    mode: str,
) -> torch.Tensor:
    """What a convolution reads for each position of its result, channels and kernel as features.

    Shapes: image (batch, channels, *spatial); the result (batch, positions, channels · kernel), in
    the order of the convolution's weight.
    """
    if any(chain(*padding)):
        image = F.pad(image, tuple(chain(*reversed(padding))), mode)
    for dim, (length, step, gap) in enumerate(zip(size, stride, dilation, strict=True), 2):
        image = image.unfold(dim, gap * (length - 1) + 1, step)[..., ::gap]
    rank = len(size)  # (batch, channels, *positions, *kernel)
    return image.movedim(1, rank + 1).flatten(rank + 1).flatten(1, rank)
