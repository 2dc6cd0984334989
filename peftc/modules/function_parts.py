"""What functions have besides their arguments: objects, closures and defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn


def closure_parts(function: FunctionType) -> Iterator[Any]:
    """The objects in the closure of a function of Python."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is not filled yet
            continue


def function_parts(function: FunctionType) -> Iterator[Any]:
    """What a function of Python has besides its arguments: a closure and defaults."""
    yield from closure_parts(function)
    yield from function.__defaults__ or ()
    defaults: Mapping[str, Any] = function.__kwdefaults__ or {}
    yield from defaults.values()


def held_part(function: Any) -> nn.Module | torch.Tensor | None:
    """A module or a tensor that a function, a method or a partial holds; None without."""
    seen = set[int]()
    parts = [function]
    while parts:
        part = parts.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, nn.Module | torch.Tensor):
            return part
        if isinstance(part, MethodType):
            parts += (part.__self__, part.__func__)
        elif isinstance(part, partial):
            call = cast("partial[Any]", part)
            parts += (call.func, *call.args, *call.keywords.values())
        elif isinstance(part, FunctionType):
            parts += function_parts(part)
        elif isinstance(part, list | tuple):
            parts += cast("list[Any]", part)
    return None
