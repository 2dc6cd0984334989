"""Modules and parameters as torch's constructors make them, in less time: there are thousands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

_set_attribute = object.__setattr__  # that of modules compares each value with all kinds of members


def module_with(cls: type[M], attributes: dict[str, Any]) -> M:
    """A module that has this dictionary, without a call of its constructor."""
    module = object.__new__(cls)
    _set_attribute(module, "__dict__", attributes)
    return module


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """`module.__class__ = cls`."""
    _set_attribute(module, "__class__", cls)


def uninitialised_like(parameter: nn.Parameter) -> Callable[[], nn.Parameter]:
    """A function that makes parameters of the dtype, the device and the sizes of a dense one."""
    size, dtype, device = tuple(parameter.shape), parameter.dtype, parameter.device
    # Faster than `empty`.
    values = partial(torch.empty_strided, size, parameter.stride(), dtype=dtype, device=device, requires_grad=True)

    def make() -> nn.Parameter:
        tensor: Any = values()
        if type(tensor) is not Tensor:  # a mode has made it
            return nn.Parameter(tensor.detach())
        tensor.__class__ = nn.Parameter  # half the time of a second tensor, which `nn.Parameter` makes
        return cast("nn.Parameter", tensor)

    return make
