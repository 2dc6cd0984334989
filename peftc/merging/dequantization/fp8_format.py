"""Weights in 8 bits with a scale for each block, as DeepSeek's: W = q ⊙ s.

The products are transformers' own (`Fp8Dequantize`). It takes whole blocks: the last rows and
columns of others are filled up, and cut off again. Floats of 8 bits without a scale are cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peftc.merging.checkpoint import DTYPES, Checkpoint
from peftc.merging.dequantization.weights import Quantization, QuantizedWeight, library, not_dense

SCALE, MODULE_SCALES = "_scale_inv", ("scale", "qscale_weight")  # what checkpoints call them
ACTIVATIONS = ("activation_scale", "input_scale", "qscale_act")
FLOATS = ("F8_E4M3", "F8_E5M2")
PACKED = "I8"  # two floats of 4 bits in a byte


def quantization(checkpoint: Checkpoint, options: dict[str, Any], dtype: torch.dtype) -> Quantization:
    convert = library("transformers.integrations.finegrained_fp8", "transformers").Fp8Dequantize(None).convert
    entries, blocks = checkpoint.entries, options.get("weight_block_size")
    weights, unused = list[QuantizedWeight](), set[str]()
    for key, entry in entries.items():
        module = key.rpartition(".")[0]
        scales = [f"{key}{SCALE}", *(f"{module}.{name}" for name in MODULE_SCALES if key == f"{module}.weight")]
        scale = next((name for name in scales if name in entries), None)
        is_packed = entry.dtype == PACKED and scale is not None
        if entry.dtype not in FLOATS and not is_packed:
            continue
        if scale is None and options:
            raise not_dense(f"`{key}` has no scales")
        parts = {"weight": key} if scale is None else {"weight": key, "weight_scale_inv": scale}
        shape = (*entry.shape[:-1], 2 * entry.shape[-1]) if is_packed else entry.shape
        make = _cast if scale is None else partial(_blocks, convert, blocks)
        weights.append(QuantizedWeight(key, parts, dtype, shape, make))
        unused |= {name for a in ACTIVATIONS if (name := f"{module}.{a}") in entries}
    if unknown := [key for key, entry in entries.items() if entry.dtype not in DTYPES]:
        raise not_dense(f"`{unknown[0]}` is of the type {entries[unknown[0]].dtype}")
    return Quantization(weights, frozenset(unused))


def _cast(parts: dict[str, Tensor]) -> Tensor:
    return parts["weight"].float()


def _blocks(convert: Any, blocks: Sequence[int] | None, parts: dict[str, Tensor]) -> Tensor:
    weight, scales = parts["weight"], parts["weight_scale_inv"]
    if not blocks or scales.ndim != len(blocks) or weight.dtype == torch.int8:
        return convert(parts)["weight"]
    rows, columns = weight.shape
    whole = torch.zeros([n * block for n, block in zip(scales.shape, blocks, strict=True)], dtype=torch.uint8)
    whole = whole.view(weight.dtype)
    whole[:rows, :columns] = weight
    return convert({**parts, "weight": whole})["weight"][:rows, :columns]
