"""Weights of the format compressed-tensors: 8 bits with scales, packed integers, and others.

What belongs to a weight, and what it is in full, its own `CompressedTensorsDequantizer` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peftc.merging.checkpoint import Checkpoint
from peftc.merging.dequantization.weights import Quantization, QuantizedWeight, library, not_dense

PACKAGE = "compressed-tensors"
SHAPE = "weight_shape"


def quantization(checkpoint: Checkpoint, options: dict[str, Any], dtype: torch.dtype) -> Quantization:
    converters = library("compressed_tensors.entrypoints.convert.converters", PACKAGE)
    metadata = library("compressed_tensors.quantization", PACKAGE)
    try:
        dequantizer = converters.CompressedTensorsDequantizer(str(checkpoint.folder), dtype=torch.float32)
    except ValueError as error:
        raise not_dense(f"{error}") from error
    names = {*metadata.QuantizationMetadata.all_qparam_names(), *(n.value for n in metadata.KVCacheScaleType)}
    weights, used = list[QuantizedWeight](), set[str]()
    for key in checkpoint.entries:
        others = sorted(dequantizer.get_dependencies(key))
        missing = [other for other in others if other not in checkpoint.entries]
        if len(missing) == len(others):  # a norm: where a class is named, each `weight` is taken for one of it
            continue
        if missing:
            raise not_dense(f"`{key}` is without `{missing[0]}`")
        module = key.rpartition(".")[0]
        parts = {k.rpartition(".")[2]: k for k in (key, *others)}
        shape = checkpoint.entries[key].shape
        if SHAPE in parts:
            shape = tuple(checkpoint.read(parts[SHAPE]).tolist())
        elif "weight" not in parts:
            raise not_dense(f"no tensor says the shape of `{module}.weight`")

        def make(parts: dict[str, Tensor], module: str = module) -> Tensor:
            return dequantizer.process({f"{module}.{name}": value for name, value in parts.items()})[f"{module}.weight"]

        weights.append(QuantizedWeight(f"{module}.weight", parts, dtype, shape, make))
        used |= {*parts.values()}
    unused = {key for key in checkpoint.entries if key not in used and key.rpartition(".")[2] in names}
    return Quantization(weights, frozenset(unused))
