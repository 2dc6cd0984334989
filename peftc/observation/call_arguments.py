"""The arguments of calls of modules, bound to parameters once for calls with the same objects.

Layers that repeat another one are mostly called with the very objects that it was called with: the
result of a layer that ran, a mask, a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from peftc.observation.first_tensor import first_tensor, input_path
from peftc.observation.layer_keys import arguments_key
from peftc.tracing.in_place import disable_function_modes
from peftc.tracing.module_calls import bind_arguments


@dataclass(frozen=True, eq=False)
class BoundCall:
    """The arguments of a call of the forward of a module's class."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Defaults included, by parameter. Raises: TypeError, ValueError if they do not fit."""
        return bind_arguments(type(self.module).forward, self.module, self.args, self.kwargs)

    @cached_property
    def first_input(self) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """The path to the first tensor, () if the arguments do not fit, and its shape."""
        with disable_function_modes():
            if (first := first_tensor((self.args, self.kwargs))) is None:
                return None
            try:
                arguments = self.arguments
            except (TypeError, ValueError):  # a forward of the instance takes other arguments
                arguments = None
            return input_path(arguments), tuple(first[1].shape)

    @cached_property
    def key(self) -> str:
        return arguments_key(self.arguments)

    @cached_property
    def exact_key(self) -> str:
        return arguments_key(self.arguments, exact=True)


class CallArguments:
    """Knows calls by the objects in them, which it keeps. Lists and dicts may be filled in between:
    calls with them are looked at anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[BoundCall, list[Any]]] = {}

    def of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        key = type(module).forward, *map(id, args), *kwargs, *map(id, kwargs.values())
        with disable_function_modes():
            known = self._known.get(key)
            if known is not None and known[1] == [_layout(tensor) for tensor, *_ in known[1]]:
                return known[0]
            call = BoundCall(module, args, kwargs)
            tensors: list[torch.Tensor] = []
            if all(_is_fixed(value, tensors) for value in (*args, *kwargs.values())):
                self._known[key] = call, [_layout(tensor) for tensor in tensors]
        return call


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What may change of a tensor, behind the tensor itself."""
    return tensor, tensor.shape, tensor.dtype, tensor.requires_grad


def _is_fixed(value: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether Python code sees the same in an argument at any time, apart from `tensors` in it."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return True
    if isinstance(value, tuple):
        return all(_is_fixed(item, tensors) for item in value)
    return not isinstance(value, (list, dict))
