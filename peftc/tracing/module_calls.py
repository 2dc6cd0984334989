"""Calls of modules: whose forward, with which arguments."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import get_testing_overrides

from peftc.tracing.proxy import contains_proxy, is_proxy


def is_constant(value: Any) -> bool:
    """Whether an argument is a plain constant: the graph is made for its value, and guarded by it."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def nested_nodes(value: Any) -> Any:
    """`value` with every proxy replaced by its node."""
    if is_proxy(value):
        return value.node
    if isinstance(value, (tuple, list)):
        return tuple(map(nested_nodes, value))
    if isinstance(value, dict):
        return {k: nested_nodes(v) for k, v in value.items()}
    return value


def forward_signature(module: nn.Module) -> inspect.Signature:
    """The signature of a module's own forward, behind whatever wraps it."""
    return inspect.signature(inspect.unwrap(type(module).forward))


def bind_arguments(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of one call of a module by parameter name, defaults filled in."""
    bound = inspect.signature(inspect.unwrap(forward)).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


def positional(
    kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of one of torch's operations, with the tensors that it cannot do without in their places.

    `linear(input=x, weight=w)` is `linear(x, w)`: whoever reads a graph finds an operand where it belongs.
    """
    rest = dict(kwargs)
    for name in required(kind, target)[len(args) :] if rest else ():
        if name not in rest or not (contains_proxy(rest[name]) or isinstance(rest[name], torch.Tensor)):
            break
        args = (*args, rest.pop(name))
    return args, rest


@cache
def required(kind: str, target: Any) -> tuple[str, ...]:
    """The parameters without a default of a function or method of torch, as torch's own table of overrides has them."""
    function = getattr(torch.Tensor, target, None) if kind == "call_method" else target
    table = get_testing_overrides() if kind in ("call_method", "call_function") else {}
    if not callable(function) or function not in table:
        return ()
    parameters = inspect.signature(table[function]).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
