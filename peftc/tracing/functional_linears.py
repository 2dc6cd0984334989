"""Linears whose code a region does not call, but whose weight and bias it hands to torch's function by itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from peftc.tracing.tensor_provenance import Tape


def linear_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], root: nn.Module, tensors: Mapping[int, str], tape: Tape
) -> str | None:
    """The nn.Linear that `linear(x, weight, bias)` is a call of, by its name in `root`.

    Args: `tensors`: the names of parameters by identity.
    """
    owner, _, attribute = tensors.get(id(args[1]), "").rpartition(".")
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if bias is None or attribute != "weight":
        return None
    module = root.get_submodule(owner)
    own = isinstance(module, nn.Linear) and inspect.unwrap(type(module).forward) is nn.Linear.forward
    return owner if own and part_of(bias, tape) is module.bias else None


def part_of(tensor: torch.Tensor, tape: Tape) -> torch.Tensor:
    """The tensor that one is a copy of: where some of one size are put together, and then taken apart again."""
    split, index = tape.parts.get(id(tensor), (None, 0))
    if split is None or split.target != "chunk":
        return tensor
    joined = tape.made.get(id(split.args[0]), [])
    if len(joined) != 1 or joined[0].target is not torch.cat:
        return tensor
    parts: Any = joined[0].args[0]
    alike = {p.shape for p in parts} == {tensor.shape} and split.args[1:] == (len(parts),)
    return parts[index] if alike else tensor
