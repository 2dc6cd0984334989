"""Modules and parameters as torch's constructors make them, in less time: there are thousands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

_set_attribute = object.__setattr__  # that of modules compares each value with all kinds of members
_make_parameter: Any = Tensor._make_subclass  # pyright: ignore[reportPrivateUsage]  # as `nn.Parameter` does


def module_with(cls: type[M], attributes: dict[str, Any]) -> M:
    """A module that has this dictionary, without a call of its constructor."""
    module = object.__new__(cls)
    _set_attribute(module, "__dict__", attributes)
    return module


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """`module.__class__ = cls`."""
    _set_attribute(module, "__class__", cls)


def uninitialised_like(parameter: nn.Parameter) -> Callable[[], Tensor]:
    """A function that makes the values of parameters of the dtype, the device and the sizes of a
    dense one, for `as_parameter`.
    """
    size, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
    # Faster than `empty`.
    return partial(torch.empty_strided, size, parameter.stride(), dtype=dtype, device=device)


def as_parameter(data: Tensor) -> nn.Parameter:
    """`nn.Parameter(data)`."""
    return _make_parameter(nn.Parameter, data, True) if type(data) is Tensor else nn.Parameter(data)
