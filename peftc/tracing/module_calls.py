"""Calls of modules and of torch's functions, with their arguments bound to parameters."""

import inspect
from collections.abc import Mapping
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import get_testing_overrides

from peftc.modules.walk import submodule
from peftc.tracing.proxy import contains_proxy
from peftc.tracing.tracer_base import TracerBase


def is_constant(value: Any) -> bool:
    """Whether an argument is plain: the graph is specialized on its value."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def forward_signature(module: nn.Module) -> inspect.Signature:
    """The signature of a module's own forward, without decorators."""
    return inspect.signature(inspect.unwrap(type(module).forward))


def bind_arguments(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `forward`, defaults included, by parameter."""
    bound = _signature(inspect.unwrap(forward)).bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])


@lru_cache(maxsize=1024)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def with_positional_tensors(
    kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`linear(x, w)` for `linear(input=x, weight=w)`: readers of a graph find operands by index."""
    rest = dict(kwargs)
    tensors = {n for n, v in rest.items() if contains_proxy(v) or isinstance(v, torch.Tensor)}
    tensors -= {"dtype", "device"}  # a proxy there is no operand
    for name in _required_parameters(kind, target)[len(args) :] if tensors else ():
        if name not in tensors:
            break
        args = (*args, rest.pop(name))
    return args, rest


@cache
def _required_parameters(kind: str, target: Any) -> tuple[str, ...]:
    function = getattr(torch.Tensor, target, None) if kind == "call_method" else target
    if isinstance(function, FunctionType) and not str(function.__module__).startswith("torch"):
        return ()  # the table takes 10 ms to make
    table = get_testing_overrides() if kind in ("call_method", "call_function") else {}
    if not callable(function) or function not in table:
        return ()
    parameters = inspect.signature(table[function]).parameters.values()
    return tuple(p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)


def functional_linear(tracer: TracerBase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The nn.Linear whose weight and bias code passes to `F.linear` without calling it."""
    name, _, attribute = tracer.tensor_names.get(id(args[1]), "").rpartition(".")
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if bias is None or attribute != "weight":
        return None
    module = submodule(tracer.root, name)
    is_linear = isinstance(module, nn.Linear) and inspect.unwrap(type(module).forward) is nn.Linear.forward
    return name if is_linear and tracer.provenance.chunk_source(bias) is module.bias else None
