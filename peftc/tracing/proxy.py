"""Proxies with the values of one call: ordinary Python runs on them and records a graph."""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from peftc.tracing.bytecode import asks_for_class, is_cached_call, is_raised, is_used_unseen, running_instruction
from peftc.tracing.in_place import AUGMENTED, Binding, leaves, version
from peftc.tracing.ragged_loops import RaggedSizes, Segments
from peftc.tracing.records import contents, converted, is_named_tuple, is_record
from peftc.tracing.region_trace import TraceError, UnknownLength, is_input
from peftc.tracing.tracer_base import TracerBase, is_called_by_library

# Independent of a tensor's values. Those of an argument may differ in another call.
TENSOR_PROPERTIES = frozenset({"ndim", "layout", "requires_grad", "is_cuda", "is_nested", "is_sparse", "is_quantized"})


class ConcreteProxy(fx.Proxy):
    """A `Proxy` with the value of its node, which answers Python's questions (type, truth, length).

    Each answer that may differ in another call becomes a guard. Sizes of tensors stay symbolic.
    """

    __array_priority__ = torch.Tensor.__array_priority__  # `np.float64(2) * x` is torch's
    tracer: TracerBase  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, node: fx.Node, tracer: TracerBase, value: Any) -> None:
        self._value = value
        self.binding = Binding(tracer, node, value)
        self.tracer = tracer
        if isinstance(value, torch.Tensor):
            tracer.mutations.bindings.add(self.binding)

    @property
    def node(self) -> fx.Node:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.binding.node()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        value = object.__getattribute__(self, "_value")
        if isinstance(value, (tuple, list, dict)) and is_called_by_library(1):
            return ConcreteProxy  # one value, of which torch.fx has a node
        if isinstance(value, torch.Tensor) and not value.ndim and not asks_for_class(*running_instruction(1)):
            return ConcreteProxy  # C code that reads a number from what looks like a tensor ends the process
        self.tracer.guard_type(self.node, type(value))
        return class_of(value)

    def __bool__(self) -> bool:
        try:
            value = bool(self._value)
        except DataDependentOutputException:
            return self.tracer.outcome_of(self.node)
        return self.tracer.guard(self.node, "bool", value)

    def __index__(self) -> int:
        return self.tracer.guard(self.node, "int", int(self._value))

    __int__ = __index__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Of a number that NumPy computes with: `np.sqrt(x.shape[1])`."""
        if not self._is_number():
            raise TraceError("a tensor is given to NumPy")
        return np.asarray(self._guarded_number(), dtype)

    def __float__(self) -> float:
        return self.tracer.guard(self.node, "float", float(self._value))

    def __format__(self, spec: str) -> str:
        value = self._value if self._is_in_error(sys._getframe(1)) else self._guarded_number()  # pyright: ignore
        return self.tracer.format_value(value, spec)

    def __str__(self) -> str:
        """Of a device or a size the text, which code compares, or has as a key."""
        if isinstance(self._value, (torch.device, int, float)) and self.tracer.recording:
            return self.tracer.record("call_function", str, (self,))
        return super().__str__()

    def __repr__(self) -> str:
        """Of a size in a tuple whose text is asked for."""
        if not self._is_number():
            return super().__repr__()
        return repr(self._value if self._is_in_error(sys._getframe(1)) else self._guarded_number())  # pyright: ignore

    def __len__(self) -> int:
        if isinstance(self._value, torch.Tensor):
            return self.tracer.guard(self.size(0).node, "int", len(self._value))
        if isinstance(self._value, RaggedSizes | Segments):
            raise UnknownLength(getattr(self._value, "caller", ""))
        return self._guarded_if_external("len", len(self._value))

    def __contains__(self, key: object) -> bool:
        value = self._value
        if isinstance(value, torch.Tensor):
            return key in value
        return self.tracer.guard(self.tracer.record_node(operator.contains, (self, key)), "bool", key in value)

    def __eq__(self, other: object) -> Any:
        if not self.tracer.recording or (is_proxy(other) and other.tracer is not self.tracer):  # pyright: ignore
            return self is other  # a key that a cache of the code has kept since another trace
        if self._is_key() and (type(other) in (int, float) or (is_proxy(other) and other._is_key())):  # pyright: ignore
            return self._value == concrete_values(other)  # its value is guarded: keys are always or never equal
        return super().__eq__(other)

    def __hash__(self) -> int:
        """Of a size or a device that is a key: the hash of its value. A function that remembers its
        results has none for a proxy: it computes them in the graph, for all sizes.
        """
        if isinstance(self._value, torch.device) and self.tracer.recording:
            str(self)  # guards it
            return hash(self._value)
        if not self._is_number() or is_cached_call(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            return id(self)
        self.tracer.number_keys.add(self.node)
        return hash(self._guarded_number())

    def _is_in_error(self, frame: FrameType) -> bool:
        """Whether a text that code makes of a number is that of an error, or it is no number."""
        # Seen in: no transformers model, but einops, whose messages have the shapes
        return not self._is_number() or self.tracer.handles_error() or is_raised(frame)

    def _is_key(self) -> bool:
        return self._is_number() and self.node in self.tracer.number_keys

    def _is_number(self) -> bool:
        return type(self._value) in (int, float) and self.tracer.recording

    def _guarded_number(self) -> int | float:
        return self.__float__() if type(self._value) is float else self.__index__()

    def __getitem__(self, key: Any) -> Any:
        key = key.for_tensor(self._value) if type(key) is MaskIndices else key
        return self.tracer.record("call_function", operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        key = key.for_tensor(self._value) if type(key) is MaskIndices else key
        self.tracer.record("call_function", operator.setitem, (self, key, value))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("tracer", "binding", "_value"):
            object.__setattr__(self, name, value)
        else:
            self.tracer.record_node(setattr, (self, name, value))
            setattr(self._value, name, concrete_values(value))

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._value, dict):
            return iter(self._guarded_keys())
        if isinstance(self._value, Segments):
            variables = self.tracer.loops.iterate(self.node, self._value)
            return (ConcreteProxy(node, self.tracer, node.meta["example"]) for node in variables)
        return iter([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        value = object.__getattribute__(self, "_value")
        if isinstance(value, torch.Tensor):
            if name == "requires_grad" and self.node.op != "placeholder" and not is_called_by_library(1):
                return self.tracer.record("call_function", getattr, (self, name))  # examples have no gradients
            if name in TENSOR_PROPERTIES:
                if self.node.op != "placeholder" or name == "ndim":  # the `ndim` of an argument is always guarded
                    return getattr(value, name)
                return self.tracer.guard(self.tracer.record_node(getattr, (self, name)), "is", getattr(value, name))
            if name == "dtype":
                self.tracer.depends_on_dtype = True
                return value.dtype
            if name == "shape":
                return self.size()
        try:
            attribute = getattr(value, name)
        except AttributeError:
            self.tracer.reject_none(self.node, value)
            self.tracer.guard_type(self.node, type(value))  # `hasattr` distinguishes classes
            raise
        if isinstance(value, dict) and name in ("keys", "values", "items"):
            self._guarded_keys()
            return getattr({k: self[k] for k in value}, name)
        if callable(attribute) and not isinstance(attribute, nn.Module):
            return lambda *args, **kwargs: self.tracer.record("call_method", name, (self, *args), kwargs)
        return self.tracer.record("call_function", getattr, (self, name))

    def _guarded_keys(self) -> list[Any]:
        keys = list(self._value)
        plain = all(isinstance(key, str | int) for key in keys)
        return self._guarded_if_external("keys", keys) if plain else keys

    def _guarded_if_external(self, kind: str, value: Any) -> Any:
        """Not of an operation's result, which has as many entries in every call."""
        external = is_input(self.node) or self.node.target is getattr
        return self.tracer.guard(self.node, kind, value) if external else value

    @property
    def keys(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.__getattr__("keys")  # fx.Proxy has a method of this name; cache layers an attribute

    def size(self, *dims: int) -> Any:
        if isinstance(self._value, torch.Tensor) and not dims:
            return tuple(self.size(i) for i in range(self._value.ndim))
        if self.binding.is_written:
            return ConcreteProxy(self.binding.original, self.tracer, self._value).size(*dims)
        return self.tracer.record("call_method", "size", (self, *dims))

    def dim(self) -> int:
        return self._value.dim()

    def __add__(self, other: Any) -> Any:
        return (*self, *other) if _are_tuples(self, other) else super().__add__(other)  # pyright: ignore

    def __mul__(self, other: Any) -> Any:
        return other * self.__index__() if self._repeats(other) else super().__mul__(other)  # pyright: ignore

    def __rmul__(self, other: Any) -> Any:
        return other * self.__index__() if self._repeats(other) else super().__rmul__(other)  # pyright: ignore

    def _repeats(self, other: Any) -> bool:
        """Whether a product with a sequence of the code's own is the sequence, several times."""
        return isinstance(other, list | tuple) and self._is_number()

    def __round__(self, *digits: int) -> Any:
        return self.tracer.record("call_function", round, (self, *digits))

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __radd__(self, other: Any) -> Any:
        return (*other, *self) if _are_tuples(self, other) else super().__radd__(other)  # pyright: ignore


def _augmented_assignment(function: Callable[..., Any]) -> Callable[..., Any]:
    # fx records `x = x + y`, which loses the write where code has a second name for `x`.
    def method(self: ConcreteProxy, other: Any) -> Any:
        if not isinstance(self._value, torch.Tensor):  # pyright: ignore[reportPrivateUsage]
            return NotImplemented
        return self.tracer.record("call_function", function, (self, other))

    return method


for _function in AUGMENTED:
    setattr(ConcreteProxy, f"__{_function.__name__}__", _augmented_assignment(_function))


def class_of(value: object) -> type:
    """The class that a value has in a call."""
    return torch.Tensor if isinstance(value, FakeTensor) else type(value)


def is_proxy(value: object) -> bool:
    return type(value) is ConcreteProxy  # `isinstance` would record a guard


def _are_tuples(*values: Any) -> bool:
    return all(isinstance(concrete_values(v) if is_proxy(v) else v, tuple) for v in values)


class MaskIndices:
    """The positions where a mask is true. How many there are, only data tells; but code that
    indexes with all of them may as well index with the mask: `x[torch.where(mask)] = 0`.

    `record` records the operation itself, for any use but as a whole key.
    """

    # Seen in: no transformers model, but Mask2Former as published

    def __init__(self, mask: ConcreteProxy, record: Callable[[], Any]) -> None:
        self.mask, self.record, self.version = mask, record, version(concrete_values(mask))

    def check(self) -> None:
        """Raises: TraceError where code has written into the mask."""
        if self.version != version(concrete_values(self.mask)):
            raise TraceError("the entries of a mask are used behind a write into it")

    @cached_property
    def proxy(self) -> Any:
        self.check()
        return self.record()

    def for_tensor(self, value: Any) -> Any:
        """The key of a tensor: the mask where it has the sizes of the first dimensions."""
        self.check()
        sizes = concrete_values(self.mask).shape
        return self.mask if isinstance(value, torch.Tensor) and value.shape[: len(sizes)] == sizes else self.proxy

    def __iter__(self) -> Iterator[Any]:
        return iter(self.proxy)

    def __len__(self) -> int:
        return len(self.proxy)

    def __getitem__(self, key: Any) -> Any:
        return self.proxy[key]


def mask_of_indices(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The mask whose true entries an operation lists, a tensor for each dimension; else None."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_list = (name == "where" and not kwargs) or (name == "nonzero" and dict(kwargs) == {"as_tuple": True})
    if not is_list or len(args) != 1 or not is_proxy(args[0]):
        return None
    mask = concrete_values(args[0])
    return args[0] if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim else None


class Attribute:
    """A number that the graph reads from a module; Python's own use of it guards its value.

    C code (`range`, an index of a list, `math.sqrt`) uses a number without a call of its methods.
    So a number that is no operand of the graph is guarded, too. `position`: where code reads it.
    """

    path: str
    tracer: TracerBase
    value: bool | int | float
    position: tuple[CodeType, int] | None
    is_operand: bool

    @property
    def is_used_by_python(self) -> bool:
        """Whether C code may have used the value. It is known once the code has run."""
        if self.position is None or self.path.rpartition(".")[2] == "training":
            return False
        return is_used_unseen(*self.position, self.is_operand)


_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod
    neg pos abs eq ne lt le gt ge bool int float round trunc floor ceil
    and rand or ror xor rxor lshift rlshift rshift rrshift invert
"""


def _attribute_class(kind: type) -> type:
    def guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            self.tracer.guard_attribute(self.path, self.value)
            return operation(self, *args)

        return method

    names = [f"__{name}__" for name in _OPERATORS.split() if hasattr(kind, f"__{name}__")]
    methods: dict[str, Any] = {name: guarded(getattr(kind, name)) for name in names}
    return type(f"Attribute{kind.__name__.title()}", (Attribute, kind), methods | {"__hash__": kind.__hash__})


_ATTRIBUTES = {int: _attribute_class(int), float: _attribute_class(float)}
_ATTRIBUTES[bool] = _ATTRIBUTES[int]  # `bool` cannot be subclassed


def attribute_proxy(value: float, path: str, tracer: TracerBase, position: tuple[CodeType, int] | None = None) -> Any:
    attribute: Any = _ATTRIBUTES[type(value)](value)
    attribute.path, attribute.tracer, attribute.value = path, tracer, value
    attribute.position, attribute.is_operand = position, False
    return attribute


def concrete_values(value: Any) -> Any:
    """`value` with the concrete value of each proxy in it."""
    if is_proxy(value):
        return value._value
    if isinstance(value, Attribute):
        return value.value
    if is_record(value):
        return converted(value, concrete_values)
    if isinstance(value, (tuple, list)):
        return type(value)(map(concrete_values, value))
    if isinstance(value, dict):
        return {k: concrete_values(v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*map(concrete_values, (value.start, value.stop, value.step)))
    return value


def nested_nodes(value: Any) -> Any:
    """`value` with the node of each proxy in it; lists become tuples, and dataclasses
    dictionaries.
    """
    if is_proxy(value):
        return value.node
    if is_record(value) and not is_named_tuple(value):
        value = contents(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(nested_nodes, value))
    if isinstance(value, dict):
        return {k: nested_nodes(v) for k, v in value.items()}
    return value


def contains_proxy(value: Any) -> bool:
    return any(map(is_proxy, leaves(value)))
