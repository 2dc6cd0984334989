"""The children that the own code of an edited module sees: all but the container of the edits.

A Sequential, or code that unpacks `self._modules.values()`, would run the container as one of them.
PyTorch and peftc see all children: to move, to save and to list them.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from peftc.rewriting.edits import CONTAINER, own_children, own_length
from peftc.rewriting.legality.bypasses import names_in, names_of
from peftc.tracing.tracer_base import is_called_by_library

_READERS = frozenset({"_modules", "children", "named_children"})


def child_members(base: type[nn.Module]) -> dict[str, Any]:
    """The members of a generated class by which code finds the container, and does not run it."""
    members: dict[str, Any] = {CONTAINER: property(_container)}  # in a third of the time of `nn.Module.__getattr__`
    if issubclass(base, (nn.Sequential, nn.ModuleList)):
        members |= {"__iter__": own_children, "__len__": own_length, "__getitem__": _getitem_of(base)}
    if issubclass(base, nn.ModuleDict):
        members |= {name: _of_own_modules(name) for name in ("__iter__", "__len__", "keys", "items", "values")}
    if _reads_children(base):
        members |= {
            "_modules": property(_visible_modules, _set_modules),
            "children": _children,
            "named_children": _named_children,
        }
    return members


class _OwnModules(dict[str, Any]):
    """The children of a module without the container; what code writes reaches the module."""

    def __init__(self, modules: dict[str, Any]) -> None:
        super().__init__((name, child) for name, child in modules.items() if name != CONTAINER)
        self.modules = modules

    def __setitem__(self, name: str, child: Any) -> None:
        super().__setitem__(name, child)
        self.modules[name] = child

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        del self.modules[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            self.modules.pop(name)
        return super().pop(name, *default)

    def update(self, *others: Any, **more: Any) -> None:
        for name, child in dict(*others, **more).items():
            self[name] = child


def _own_modules(module: Any) -> _OwnModules:
    return _OwnModules(vars(module)["_modules"])


def _getitem_of(base: type[nn.Module]) -> Callable[[Any, Any], Any]:
    """The items of a list without the container; PyTorch takes slices of all children."""

    def item(self: Any, index: Any) -> Any:
        plain: Any = base
        if not isinstance(index, slice) or not plain.__getitem__.__module__.startswith("torch."):
            return plain.__getitem__(self, index)
        children = list(_own_modules(self).items())[index]
        return base(OrderedDict(children)) if issubclass(base, nn.Sequential) else base(child for _, child in children)

    return item


def _of_own_modules(name: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return getattr(_own_modules(self), name)()

    return method


def _reads_children(base: type[nn.Module]) -> bool:
    """Whether code of a class that is not PyTorch's reads the children of a module."""
    own = [cls for cls in base.__mro__ if not cls.__module__.startswith("torch.")]
    members = [value for cls in own for name, value in vars(cls).items() if name != "__init__"]
    functions = [getattr(value, "fget", None) or getattr(value, "__func__", value) for value in members]
    plain = [inspect.unwrap(f) for f in functions if isinstance(f, FunctionType)]
    read = {name for function in plain for name in names_in(function.__code__)}
    forward = inspect.unwrap(base.forward)
    return not _READERS.isdisjoint(read | (names_of([forward], base) if isinstance(forward, FunctionType) else set()))


def _is_for_library() -> bool:
    """Whether all children are asked for. Dynamo has no frames to look at, and looks names up where
    code would: it sees the model's own children, and the container by its property.
    """
    return not torch.compiler.is_dynamo_compiling() and is_called_by_library(2)


def _visible_modules(self: Any) -> dict[str, nn.Module]:
    return vars(self)["_modules"] if _is_for_library() else _own_modules(self)


def _set_modules(self: Any, modules: dict[str, nn.Module]) -> None:
    vars(self)["_modules"] = modules


def _container(self: Any) -> nn.Module:
    """What generated code reads. Raises: AttributeError before it is there, as any name."""
    try:
        return self.__dict__["_modules"][CONTAINER]
    except KeyError:
        raise AttributeError(CONTAINER) from None


def _children(self: Any) -> Iterator[nn.Module]:
    return nn.Module.children(self) if _is_for_library() else iter(_own_modules(self).values())


def _named_children(self: Any) -> Iterator[tuple[str, nn.Module]]:
    return nn.Module.named_children(self) if _is_for_library() else iter(_own_modules(self).items())
