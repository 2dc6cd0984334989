"""Weights that torchao has quantised: tensor classes, which the metadata of the files name.

Source: `torchao.prototype.safetensors.safetensors_support`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peftc.merging.checkpoint import Checkpoint
from peftc.merging.dequantization.weights import Quantization, QuantizedWeight, library, not_dense

PLAIN = "Tensor"


def quantization(checkpoint: Checkpoint, options: dict[str, Any], dtype: torch.dtype) -> Quantization:
    """Args: `dtype`: of a weight whose class does not say its own."""
    support = library("torchao.prototype.safetensors.safetensors_support", "torchao")
    weights = list[QuantizedWeight]()
    for name, text in {k: v for shard in checkpoint.shards.values() for k, v in shard.metadata.items()}.items():
        description = _description(text)
        if description is None or description["_type"] == PLAIN:
            continue
        module, _, attribute = name.rpartition(".")
        parts = {part: f"{module}._{attribute}_{part}" for part in sorted(description["_tensor_data_names"])}
        if missing := [key for key in parts.values() if key not in checkpoint.entries]:
            raise not_dense(f"`{name}` is without `{missing[0]}`")
        make = partial(_tensor, support, name, text)
        try:
            like = make({part: checkpoint.view(key) for part, key in parts.items()})
        except Exception as error:  # a class that this torchao does not know
            raise not_dense(f"`{name}`: {error}") from error
        main = next(iter(sorted(parts, key=lambda part: -checkpoint.entries[parts[part]].size)))
        ordered = {main: parts[main]} | parts
        own = like.dtype if like.dtype.is_floating_point and like.element_size() > 1 else dtype
        weights.append(QuantizedWeight(name, ordered, own, tuple(like.shape), partial(_dense, make)))
    return Quantization(weights)


def _dense(make: Callable[[dict[str, Tensor]], Any], parts: dict[str, Tensor]) -> Tensor:
    return make(parts).dequantize()


def _description(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("_type"), str) else None


def _tensor(support: Any, name: str, text: str, parts: dict[str, Tensor]) -> Any:
    """A tensor of torchao's class."""
    module, _, attribute = name.rpartition(".")
    data = {f"{module}._{attribute}_{part}": tensor for part, tensor in parts.items()}
    tensors, _ = support.unflatten_tensor_state_dict(data, {name: text, "tensor_names": json.dumps([name])})
    return tensors[name]
