"""Calls of modules: whose forward, with which arguments."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from peftc.tracing.example import is_example


def baked(value: Any) -> bool:
    """Whether an argument is a plain constant: the graph is made for its value, and guarded by it."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def nested_nodes(value: Any) -> Any:
    """`value` with every proxy replaced by its node."""
    if is_example(value):
        return value.node
    if isinstance(value, (tuple, list)):
        return tuple(map(nested_nodes, value))
    if isinstance(value, dict):
        return {k: nested_nodes(v) for k, v in value.items()}
    return value


def innermost(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def signature_of(module: nn.Module) -> inspect.Signature:
    """The signature of a module's own forward, behind whatever wraps it."""
    return inspect.signature(innermost(type(module).forward))


def bind(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call of a module by parameter name, defaults filled in."""
    bound = inspect.signature(forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])
