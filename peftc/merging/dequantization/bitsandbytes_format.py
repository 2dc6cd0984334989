"""Weights that bitsandbytes has quantised: nf4 and fp4 in blocks, int8 with a scale for each row.

Source: `QuantState.as_dict` and `Linear8bitLt._save_to_state_dict` of bitsandbytes.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peftc.merging.checkpoint import Checkpoint
from peftc.merging.dequantization.weights import Quantization, QuantizedWeight, library, not_dense

STATE = ".quant_state.bitsandbytes__"
STATISTICS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
ROWS = 0  # the value of `weight_format` of weights that lie row by row


def quantization(checkpoint: Checkpoint, options: dict[str, Any], dtype: torch.dtype) -> Quantization:
    """Args: `dtype`: of int8 weights; those of 4 bits say their own."""
    functions = library("bitsandbytes.functional", "bitsandbytes")
    weights, unused = list[QuantizedWeight](), set[str]()
    for key in checkpoint.entries:
        weight, is_state, _ = key.rpartition(STATE)
        if is_state:
            names = {name: f"{weight}.{name}" for name in (*STATISTICS, key.removeprefix(f"{weight}."))}
            parts = {"": weight} | {name: own for name, own in names.items() if own in checkpoint.entries}
            state: dict[str, Any] = json.loads(bytes(checkpoint.read(key).tolist()))
            own, shape = getattr(torch, state["dtype"]), tuple(state["shape"])
            weights.append(QuantizedWeight(weight, parts, own, shape, partial(_4_bits, functions)))
            continue
        module, _, name = key.rpartition(".")
        if name == "SCB":
            weight = f"{module}.weight"
            entry = checkpoint.entries[weight]
            weights.append(
                QuantizedWeight(weight, {"": weight, "SCB": key}, dtype, entry.shape, partial(_8_bits, functions))
            )
        elif name == "weight_format":
            if int(checkpoint.read(key)) != ROWS:
                raise not_dense(f"the rows of `{module}.weight` are in an order of a kernel")
            unused.add(key)
    return Quantization(weights, frozenset(unused))


def _4_bits(functions: Any, parts: dict[str, Tensor]) -> Tensor:
    codes = parts.pop("")
    return functions.dequantize_4bit(codes, functions.QuantState.from_dict(parts, device=codes.device))


def _8_bits(functions: Any, parts: dict[str, Tensor]) -> Tensor:
    return functions.int8_vectorwise_dequant(parts[""], parts["SCB"])
