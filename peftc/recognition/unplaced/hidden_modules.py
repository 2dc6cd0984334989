"""Modules that PyTorch does not know: in plain lists, and in functions that attributes hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from peftc.modules.walk import outline

_MOST = 3  # lines


def hidden_module_lines(model: nn.Module) -> list[str]:
    """A line for each attribute that holds modules which are no children, at most a few."""
    lines: list[str] = []
    for name, module in outline(model):
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or (line := _line(value)) is None:
                continue
            path = f"{name}.{attribute}".lstrip(".")
            lines.append(f"`{path}` of {type(module).__name__} is {line}")
            if len(lines) == _MOST:
                return lines
    return lines


def _line(value: Any) -> str | None:
    if isinstance(value, list | tuple | set | dict):
        parts: Any = value.values() if isinstance(value, dict) else value
        if not any(isinstance(part, nn.Module) for part in parts):
            return None
        better = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
        return f"a {type(value).__name__}, and PyTorch does not know the modules in it: `{better}` makes them known"
    if any(isinstance(part, nn.Module) for part in _held(value)):
        return "a function that holds a module of the model: a copy of the model would call the same module"
    return None


def _held(value: Any) -> Iterator[Any]:
    """What a function has besides its arguments: a closure, defaults, the object of a method."""
    if isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
        yield from value.__defaults__ or ()
        defaults: Mapping[str, Any] = value.__kwdefaults__ or {}
        yield from defaults.values()
