"""The children of a layer that is like another one: they are copied when something looks at them.

A deep model repeats few kinds of layers. A copy without data needs one layer of each kind in full;
of the others, most code asks for names, classes and shapes alone, which their prototype has.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import nn

Children = dict[str, nn.Module | None]
Attributes = Mapping[tuple[str, str], Any]  # by the name of a module in a layer, and that of an attribute

_copying = threading.RLock()


class LayerPrototype:
    """A layer that is like others: their classes, shapes of parameters and options are equal. It is
    part of no model, and never runs.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    @cached_property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The modules in the layer, each of which has one name."""
        return list(self.layer.named_modules())[1:]

    @cached_property
    def size(self) -> int:
        """The number of scalars of the parameters of its parts."""
        return sum(p.numel() for _, part in self.parts for p in vars(part)["_parameters"].values() if p is not None)


class LazyChildren(dict[str, Any]):
    """The `_modules` of a layer until something looks into them; then a plain dict takes its place.

    Attributes:
        layer: the module whose children these are.
        prototype: a layer with children like these.
        attributes: those of the modules in the layer that differ from the prototype's.
        observers: they are called with the layer as soon as it has its children.
    """

    def __init__(
        self, layer: nn.Module, prototype: LayerPrototype, attributes: Attributes, make: Callable[[], Children]
    ) -> None:
        super().__init__()
        self.layer, self.prototype, self.attributes = layer, prototype, attributes
        self.observers: list[Callable[[nn.Module], None]] = []
        self._make: Callable[[], Children] | None = make
        self._children: Children = {}
        self._parts: tuple[str, list[tuple[str, nn.Module]]] = ("", [])

    def children(self) -> Children:
        """The children, copied by the first call."""
        with _copying:
            if self._make is not None:
                self._children, self._make = self._make(), None
                if vars(self.layer).get("_modules") is self:
                    vars(self.layer)["_modules"] = self._children
                for observe in self.observers:
                    observe(self.layer)
        return self._children

    def named_parts(self, start: str) -> list[tuple[str, nn.Module]]:
        """The parts of the prototype, with names that begin so: mostly with that of the layer."""
        if self._parts[0] != start or not self._parts[1]:
            self._parts = start, [(start + name, part) for name, part in self.prototype.parts]
        return self._parts[1]

    def attribute(self, path: str) -> Any:
        """`attrgetter(path)(self.layer)`, without a look at the children."""
        names = path.split(".")
        if len(names) == 1 or names[0] in vars(self.layer):
            return attrgetter(path)(self.layer)
        for i in range(1, len(names)):
            place = ".".join(names[:i]), names[i]
            if place in self.attributes:
                value, rest = self.attributes[place], names[i + 1 :]
                return attrgetter(".".join(rest))(value) if rest else value
        return attrgetter(path)(self.prototype.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Children:
        return copy.deepcopy(self.children(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.children(),)


def _method_of_children(name: str) -> Callable[..., Any]:
    def method(self: LazyChildren, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.children(), name)(*args, **kwargs)

    return method


_READS = "__contains__ __eq__ __getitem__ __iter__ __len__ __ne__ __or__ __repr__ __reversed__ __ror__ copy get items"
_WRITES = "__delitem__ __ior__ __setitem__ clear pop popitem setdefault"
for _name in f"{_READS} keys values {_WRITES} update".split():
    setattr(LazyChildren, _name, _method_of_children(_name))


def lazy_children(module: nn.Module) -> LazyChildren | None:
    """The children of a layer before they are copied; None of any other module."""
    children = vars(module)["_modules"]
    return children if type(children) is LazyChildren else None


def prototype_of(module: nn.Module) -> nn.Module:
    """The prototype of a layer whose children are not copied yet; any other module itself."""
    children = lazy_children(module)
    return module if children is None else children.prototype.layer


def attribute_of(module: nn.Module, path: str) -> Any:
    """`attrgetter(path)(module)`, without a look at lazy children. Raises: AttributeError."""
    children = lazy_children(module)
    return attrgetter(path)(module) if children is None else children.attribute(path)
