"""The children that the own code of an edited module sees: all but the container of the edits.

A Sequential, or code that unpacks `self._modules.values()`, would run the container as one of them.
PyTorch and peftc see all children: to move, to save and to list them.
"""

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from peftc.rewriting.edits import CONTAINER, own_children, own_length
from peftc.tracing.tracer_base import is_called_by_library

_READERS = frozenset({"_modules", "children", "named_children"})


def child_members(base: type[nn.Module]) -> dict[str, Any]:
    """The members of a generated class that leave out the container."""
    members: dict[str, Any] = {}
    if issubclass(base, (nn.Sequential, nn.ModuleList)):
        members |= {"__iter__": own_children, "__len__": own_length}
    if issubclass(base, nn.ModuleDict):
        members |= {name: _of_own_modules(name) for name in ("__iter__", "__len__", "keys", "items", "values")}
    if _reads_children(base):
        members |= {
            "_modules": property(_visible_modules, _set_modules),
            "children": _children,
            "named_children": _named_children,
        }
    return members


def _own_modules(module: Any) -> dict[str, nn.Module]:
    return {name: child for name, child in vars(module)["_modules"].items() if name != CONTAINER}


def _of_own_modules(name: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return getattr(_own_modules(self), name)()

    return method


def _reads_children(base: type[nn.Module]) -> bool:
    """Whether code of a class that is not PyTorch's reads the children of a module."""
    own = [cls for cls in base.__mro__ if not cls.__module__.startswith("torch.")]
    functions = [value for cls in own for name, value in vars(cls).items() if name != "__init__"]
    return any(isinstance(f, FunctionType) and not _READERS.isdisjoint(_names(f.__code__)) for f in functions)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_for_library() -> bool:
    """Whether all children are asked for. Dynamo has no frames to look at: it looks up attributes
    of generated code, which reads the container.
    """
    return torch.compiler.is_compiling() or is_called_by_library(2)


def _visible_modules(self: Any) -> dict[str, nn.Module]:
    return vars(self)["_modules"] if _is_for_library() else _own_modules(self)


def _set_modules(self: Any, modules: dict[str, nn.Module]) -> None:
    vars(self)["_modules"] = modules


def _children(self: Any) -> Iterator[nn.Module]:
    return nn.Module.children(self) if _is_for_library() else iter(_own_modules(self).values())


def _named_children(self: Any) -> Iterator[tuple[str, nn.Module]]:
    return nn.Module.named_children(self) if _is_for_library() else iter(_own_modules(self).items())
