"""Texts that modules or arguments share if one traced graph serves them all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def structure_key(module: nn.Module) -> str:
    """A text that two modules share exactly if their class trees and parameter shapes agree."""
    parts: list[str] = []
    for name, child in module.named_modules():
        shapes = ",".join(f"{n}{tuple(p.shape)}" for n, p in child.named_parameters(recurse=False))
        parts.append(f"{name}:{type(child).__qualname__}@{id(type(child))}[{shapes}]")  # classes may share a name
    return ";".join(parts)


def arguments_key(value: Any, exact: bool = False) -> str:
    """What Python code can see of arguments without the values of tensors.

    Args: `exact`: distinguishes shapes and dtypes of tensors, and objects by identity; else ranks
        and classes.
    """
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}" if exact else f"{value.ndim}d"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}={arguments_key(v, exact)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(arguments_key(v, exact) for v in value) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__}@{id(value)}" if exact else type(value).__name__
