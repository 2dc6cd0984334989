"""In-place writes: which node stands for a tensor after an operation has changed its memory.

    y.mul_(e)    y += e    torch.relu_(y)    nn.ReLU(inplace=True)(y)
    torch.add(y, e, out=y)    y[:, 0] = 0    y.view(-1).copy_(e)

Writes are detected by torch's version counter, which views share. If the operation returns the
tensor, its node is the new version. For any other tensor on the same memory, a node `new_version`
is created at its next use.
"""

import operator
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import fx

from peftc.modules.walk import submodule
from peftc.tracing.operations import new_version

# Augmented assignments, with their symbols. A tensor on the left is changed in place.
AUGMENTED = {
    operator.iadd: "+=",
    operator.isub: "-=",
    operator.imul: "*=",
    operator.itruediv: "/=",
    operator.ifloordiv: "//=",
    operator.imod: "%=",
    operator.ipow: "**=",
    operator.iand: "&=",
    operator.ior: "|=",
    operator.ixor: "^=",
}
OUT_OF_PLACE_NAMES = {function: function.__name__[1:] for function in AUGMENTED}  # `add` of `iadd`
WRITES = "writes"  # in a node's meta: the storages that it changes in place
EFFECT = "effect"  # in the meta of a method's call: it changes its object, which is no tensor

# Inside, function modes are off. With them, a trace would record reads of tensor properties.
disable_function_modes: Any = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]


class Binding:
    """The `current` node of a value. `original`: before all writes since its shape last changed."""

    def __init__(self, tracer: fx.Tracer, node: fx.Node, value: Any) -> None:
        self.tracer, self.value = tracer, value
        self.original = self.current = node
        self.pending: list[fx.Node] = []  # writes that `current` does not include
        with disable_function_modes():
            self.shape = value.shape if isinstance(value, torch.Tensor) else ()

    @property
    def is_written(self) -> bool:
        return self.original is not self.current or bool(self.pending)

    def node(self) -> fx.Node:
        if self.pending:
            writes, self.pending = self.pending, []
            self.current = self.tracer.create_node("call_function", new_version, (self.current, *writes), {})
            self.current.meta["example"] = self.value
        return self.current

    def write(self, node: fx.Node, result: object) -> None:
        """Notes that `node`, which returns `result`, has written to the tensor."""
        if result is self.value:
            self.current, self.pending = node, []
        else:
            self.pending.append(node)
        if self.value.shape != self.shape:
            self.original, self.shape = self.current, self.value.shape


class MutationTracker:
    """Applies writes to the bindings of a trace. `loop_body`: nodes of the open iteration."""

    def __init__(self, tracer: fx.Tracer) -> None:
        self.tracer = tracer
        self.bindings = WeakSet[Binding]()
        self.loop_body: list[fx.Node] | None = None
        self.written_in_loop = set[Binding]()  # of tensors from before the loop

    def record(self, node: fx.Node, result: Any, versions_before: list[tuple[torch.Tensor, int | None]]) -> None:
        """Records what a node has written. `versions_before`: its arguments, with counters."""
        node.meta["example"] = result
        written = [
            t
            for t, before in versions_before
            if (self.writes_inference_tensor(node, t, result) if before is None else version(t) != before)
        ]
        if not written:
            return
        node.meta[WRITES] = storages = frozenset(map(storage_id, written)) - {0}
        for binding in [b for b in self.bindings if storage_id(b.value) in storages]:
            if self.loop_body is not None and binding.current not in self.loop_body:
                self.written_in_loop.add(binding)
            else:
                binding.write(node, result)

    def writes_inference_tensor(self, node: fx.Node, tensor: torch.Tensor, result: object) -> bool:
        """Whether a node writes, by name: tensors from `inference_mode` have no version counter."""
        if node.target is operator.setitem or result is not tensor:
            return node.target is operator.setitem
        name = str(getattr(node.target, "__name__", node.target))
        module = submodule(self.tracer.root, name) if node.op == "call_module" else None
        flags = node.kwargs.get("inplace"), getattr(module, "inplace", False), "out" in node.kwargs
        return any(flags) or node.target in AUGMENTED or name.endswith("_")

    def end_loop(self, end: fx.Node) -> None:
        for binding in self.written_in_loop:
            binding.write(end, None)
        self.loop_body = None
        self.written_in_loop.clear()


def storage_id(value: object) -> int:
    """An id that tensors on the same memory share; 0 for sparse tensors and other values."""
    with disable_function_modes():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return 0
        return value.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def version(tensor: torch.Tensor) -> int | None:
    """The version counter; None for a tensor from `inference_mode`, which has none."""
    with disable_function_modes():
        return None if tensor.is_inference() else tensor._version


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested containers and slices. No `isinstance`: on a proxy it adds a guard."""
    if issubclass(type(value), (tuple, list)):
        for part in value:
            yield from leaves(part)
    elif issubclass(type(value), dict):
        yield from leaves(list(value.values()))
    elif type(value) is slice:
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def writes_to(node: fx.Node, value: object) -> bool:
    """Whether a node writes in place to the memory of a tensor."""
    return WRITES in node.meta and storage_id(value) in node.meta[WRITES]
