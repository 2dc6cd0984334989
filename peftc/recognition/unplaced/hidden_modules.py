"""Modules that PyTorch does not know: in plain lists and objects, and in functions that attributes
hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import nn

from peftc.modules.function_parts import closure_parts, function_parts
from peftc.modules.walk import outline

_MOST = 3  # lines


def hidden_module_lines(model: nn.Module) -> list[str]:
    """A line for each attribute that holds modules which are no children, at most a few."""
    modules = outline(model)
    lines, known = list[str](), {id(module) for _, module in modules}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or (line := _line(value, known)) is None:
                continue
            path = f"{name}.{attribute}".lstrip(".")
            lines.append(f"`{path}` of {type(module).__name__} is {line}")
            if len(lines) == _MOST:
                return lines
    return lines


def _line(value: Any, known: Collection[int]) -> str | None:
    """What a line says of the value of an attribute. `known`: the children, by `id`."""
    if isinstance(value, FunctionType):
        copied = {id(part) for part in closure_parts(value)}.intersection(known)  # `copy_functions`
        if all(id(part) in copied for part in function_parts(value) if isinstance(part, nn.Module)):
            return None
        return "a function that holds a module of the model: a copy of the model would call the same module"
    if all(id(part) in known for part in _parts(value) if isinstance(part, nn.Module)):
        return None
    if isinstance(value, list | tuple | set | dict):
        better = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
        return f"a {type(value).__name__}, and PyTorch does not know the modules in it: `{better}` makes them known"
    holds = "is a module" if isinstance(value, nn.Module) else "holds one"
    return f"no child, but {holds} that PyTorch does not know: `self.NAME = module` makes it known"


def _parts(value: Any) -> Iterator[Any]:
    """The values in which the attributes of a module may hold others."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, dict):
        yield from cast("dict[Any, Any]", value).values()
    elif isinstance(value, list | tuple | set):
        yield from cast("list[Any]", value)
    elif isinstance(value, partial):
        call = cast("partial[Any]", value)
        yield from (call.func, *call.args, *call.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__self__
    elif not isinstance(value, type | FunctionType | ModuleType) and hasattr(value, "__dict__"):
        yield from vars(value).values()
