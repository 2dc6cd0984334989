"""Proxies that carry the value their node had in the sampled call, so that ordinary Python can run on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from peftc.tracing.in_place import AUGMENTED, unobserved
from peftc.tracing.ragged_loops import Pieces, unknown

if TYPE_CHECKING:
    from peftc.tracing.tracer import RegionTracer

# Facts about a tensor that Python code asks and that do not depend on its values; of those of an argument, another call
# may have others.
TENSOR_FACTS = frozenset({"ndim", "layout", "requires_grad", "is_cuda", "is_nested", "is_sparse", "is_quantized"})


class ConcreteProxy(fx.Proxy):
    """A `Proxy` that also knows the value of its node in the sampled call.

    Python asks it questions (`isinstance`, is it true, how long, which dtype); it answers from the example, and every
    answer that another call could contradict is recorded by the tracer as a guard. Tensor sizes stay symbolic.

    An operation that changes the tensor in place gives the proxy another node: that of its result, or one that is made when the
    proxy is used next. `first` is the node from before all changes, which has the same sizes.
    """

    tracer: RegionTracer  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, node: fx.Node, tracer: RegionTracer, value: Any) -> None:
        object.__setattr__(self, "_value", value)
        self.here = self.first = node
        self.writers: list[fx.Node] = []  # since `here` stood for the tensor
        with unobserved():
            self.shape_before = value.shape if isinstance(value, torch.Tensor) else ()
        super().__init__(node, tracer)
        if isinstance(value, torch.Tensor):
            tracer.in_place.add(self)

    @property
    def node(self) -> fx.Node:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.writers:
            writers, self.writers = self.writers, []
            self.here = self.tracer.in_place.present(self.here, writers, self._value)
        return self.here

    @node.setter
    def node(self, node: fx.Node) -> None:
        self.here = node

    def change(self, writer: fx.Node, result: object) -> None:
        """`writer`, which gives `result`, has changed the tensor."""
        if result is self._value:
            self.here, self.writers = writer, []
        else:
            self.writers.append(writer)
        if self._value.shape != self.shape_before:
            self.first, self.shape_before = self.here, self._value.shape

    if TYPE_CHECKING:  # at run time fx adds the operators

        def __getitem__(self, key: Any) -> Any: ...

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = object.__getattribute__(self, "_value")
        if isinstance(value, (tuple, list, dict)):
            return ConcreteProxy
        self.tracer.guard_type(self.node, type(value))
        return type(value)

    def __bool__(self) -> bool:
        try:
            value = bool(self._value)
        except DataDependentOutputException:  # a fake tensor: both branches are kept
            return self.tracer.fork(self.node)
        return self.tracer.guard(self.node, "bool", value)

    def __index__(self) -> int:
        return self.tracer.guard(self.node, "int", int(self._value))

    __int__ = __index__

    def __float__(self) -> float:
        return self.tracer.guard(self.node, "float", float(self._value))

    def __format__(self, spec: str) -> str:
        return self.tracer.format_value(self._value, spec)

    def __len__(self) -> int:
        if isinstance(self._value, torch.Tensor):
            return self.tracer.guard(self.size(0).node, "int", len(self._value))
        unknown(len, (self._value,), {})
        if is_input(self.node) or self.node.target is getattr:
            return self.tracer.guard(self.node, "len", len(self._value))
        return len(self._value)  # how many results an operation has is not a decision

    def __contains__(self, key: object) -> bool:
        value = self._value
        if isinstance(value, torch.Tensor):
            return key in value
        node = self.tracer.record_node(operator.contains, (self, key))
        return self.tracer.guard(node, "bool", key in value)

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._value, dict):
            return iter(self.plain_keys())
        if isinstance(self._value, Pieces):
            return self.tracer.loops.turns(self, ConcreteProxy)
        return iter([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        value = object.__getattribute__(self, "_value")
        if isinstance(value, torch.Tensor):
            if name in TENSOR_FACTS:
                return self.fact(name, getattr(value, name))
            if name == "dtype":
                self.tracer.depends_on_dtype = True
                return value.dtype
            if name == "shape":
                return tuple(self.size(i) for i in range(value.ndim))
        try:
            attribute = getattr(value, name)
        except AttributeError:
            self.tracer.missed(self.node, value)
            self.tracer.guard_type(self.node, type(value))  # `hasattr` tells classes apart
            raise
        if isinstance(value, dict) and name in ("keys", "values", "items"):
            self.plain_keys()
            return getattr({k: self[k] for k in value}, name)
        if callable(attribute) and not isinstance(attribute, nn.Module):
            return lambda *args, **kwargs: self.tracer.record("call_method", name, (self, *args), kwargs)
        return self.tracer.record("call_function", getattr, (self, name))

    def fact(self, name: str, value: Any) -> Any:
        if self.node.op != "placeholder" or name == "ndim":  # how many dimensions an argument has is always a condition
            return value
        return self.tracer.guard(self.tracer.record_node(getattr, (self, name)), "is", value)

    def plain_keys(self) -> list[Any]:
        """The keys of a dictionary: which there are is a decision, but not of what an operation returns."""
        found = list(self._value)
        asked = is_input(self.node) or self.node.target is getattr
        plain = all(isinstance(key, str | int) for key in found)
        return self.tracer.guard(self.node, "keys", found) if asked and plain else found

    @property
    def keys(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__getattr__("keys")  # fx.Proxy has a method of this name; cache layers an attribute

    def size(self, *dims: int) -> Any:
        if isinstance(self._value, torch.Tensor) and not dims:
            return tuple(self.size(i) for i in range(self._value.ndim))
        if self.first is not self.here or self.writers:
            return ConcreteProxy(self.first, self.tracer, self._value).size(*dims)
        return self.tracer.record("call_method", "size", (self, *dims))

    def dim(self) -> int:
        return self._value.dim()

    def __add__(self, other: Any) -> Any:
        return (*self, *other) if tuples(self, other) else super().__add__(other)  # pyright: ignore

    def __radd__(self, other: Any) -> Any:
        return (*other, *self) if tuples(self, other) else super().__radd__(other)  # pyright: ignore

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.record("call_function", operator.setitem, (self, key, value))


def _augmented(function: Callable[..., Any]) -> Callable[..., Any]:
    """`x += y`, which fx would record as `x = x + y`: another tensor, where code has a second name for the first."""

    def method(self: ConcreteProxy, other: Any) -> Any:
        if not isinstance(self._value, torch.Tensor):  # pyright: ignore[reportPrivateUsage]
            return NotImplemented
        return self.tracer.record("call_function", function, (self, other))

    return method


for _function in AUGMENTED:
    setattr(ConcreteProxy, f"__{_function.__name__}__", _augmented(_function))


def is_input(node: fx.Node) -> bool:
    """Whether a node is an argument of the region's call, or a part of one: of a tuple, list or dictionary, at any depth."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if not isinstance(node.meta["example"], (tuple, list, dict)):
            return False
    return node.op == "placeholder"


def is_proxy(value: object) -> bool:
    return type(value) is ConcreteProxy  # `isinstance` would ask the example


def tuples(*made: Any) -> bool:
    return all(isinstance(concrete_values(m) if is_proxy(m) else m, tuple) for m in made)


class Attribute:
    """A number read from a module's attribute: traced as that attribute, so that layers can share one graph.

    Whenever Python computes or compares with it, the tracer records its value as a guard.
    """

    path: str
    tracer: RegionTracer


def _escaping(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def method(self: Any, *args: Any) -> Any:
        self.tracer.guard_attribute(self)
        return plain(self, *args)

    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs eq ne lt le gt ge bool"
)


def _attribute_class(kind: type) -> type:
    names = [f"__{n}__" for n in _OPERATORS.split()]
    methods: dict[str, Any] = {n: _escaping(kind, n) for n in names if hasattr(kind, n)}
    methods["__hash__"] = kind.__hash__
    return type(f"Attribute{kind.__name__.title()}", (Attribute, kind), methods)


AttributeInt = _attribute_class(int)
AttributeFloat = _attribute_class(float)


class Flag(Attribute, int):
    """`training`, read from a module: handed on as that attribute; recorded when Python decides on it."""

    def __bool__(self) -> bool:
        self.tracer.guard_attribute(self)
        return int(self) != 0

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    __hash__ = int.__hash__


def attribute_proxy(value: float, path: str, tracer: RegionTracer) -> Any:
    kind = Flag if isinstance(value, bool) else AttributeInt if isinstance(value, int) else AttributeFloat
    made: Any = kind(value)
    made.path, made.tracer = path, tracer
    return made


def concrete_values(value: Any) -> Any:
    """`value` with every proxy replaced by its example."""
    if is_proxy(value):
        return value._value
    if isinstance(value, Flag):
        return value.real != 0
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(concrete_values, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(concrete_values, value))
    if isinstance(value, dict):
        return {k: concrete_values(v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(concrete_values(value.start), concrete_values(value.stop), concrete_values(value.step))
    return value


def contains_proxy(value: Any) -> bool:
    if is_proxy(value):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(contains_proxy, value))
    if isinstance(value, dict):
        return any(map(contains_proxy, value.values()))
    return isinstance(value, slice) and any(map(contains_proxy, (value.start, value.stop, value.step)))
