"""What tells layers apart whose calls may share a result, or a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peftc.modules.lazy_children import prototype_of
from peftc.modules.torch_attributes import ATTRIBUTES
from peftc.modules.walk import named_modules
from peftc.tracing.in_place import disable_function_modes

_OPTIONS = frozenset({bool, str, type(None)})
_NO_OPTIONS = ATTRIBUTES | {"_is_hf_initialized"}


def structure_key(module: nn.Module) -> str:
    """Equal for two modules exactly if their class trees, parameter shapes and options are. Options
    are flags, strings and None: code branches on them. Numbers are none, as most layers have one of
    their own: a trace knows which ones decide (`RegionTrace.attribute_guards`).
    """
    # Seen in: SAM, whose first decoder layer has no residual
    parts: list[str] = []
    with disable_function_modes():
        for name, child in named_modules(prototype_of(module)):
            attributes = vars(child)
            shapes = ",".join([f"{n}{tuple(p.shape)}" for n, p in attributes["_parameters"].items() if p is not None])
            options = [(n, v) for n, v in attributes.items() if n not in _NO_OPTIONS and type(v) in _OPTIONS]
            text = f"[{shapes}]{options or ''}"
            parts.append(f"{name}:{type(child).__qualname__}@{id(type(child))}{text}")  # one name, two classes
    return ";".join(parts)


def distinctive_members(module: nn.Module, container: str) -> frozenset[str]:
    """The members that are None in a module, and may be there in others of its class; parameters
    and buffers with their shapes, of which code may make numbers, but for those in `container`.
    """
    members = ((name, vars(m) | vars(m)["_modules"] | vars(m)["_parameters"]) for name, m in module.named_modules())
    absent = [f"{name}.{key}".lstrip(".") for name, values in members for key, v in values.items() if v is None]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [f"{name}{tuple(t.shape)}" for name, t in tensors if container not in name.split(".")]
    return frozenset((*absent, *shapes))


def arguments_key(value: Any, exact: bool = False) -> str:
    """What Python code can see of arguments without the values of tensors. `exact`: with shapes,
    dtypes and the identity of objects; else ranks and classes.
    """
    with disable_function_modes():
        return _arguments_key(value, exact)


def _arguments_key(value: Any, exact: bool) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}" if exact else f"{value.ndim}d"
    if isinstance(value, dict):
        return "{" + ",".join([f"{k}={_arguments_key(v, exact)}" for k, v in value.items()]) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join([_arguments_key(v, exact) for v in value]) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__}@{id(value)}" if exact else type(value).__name__
