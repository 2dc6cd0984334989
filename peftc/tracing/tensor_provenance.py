"""Tensors that the traced code computes from constants and parameters alone, without its arguments.

Python runs such code on plain tensors. Nodes for it are created once one meets a traced value; for
memory that the code writes to, all calls on it, in their order.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import fx

from peftc.tracing.in_place import WRITES, leaves, storage_id
from peftc.tracing.operations import enter_context


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """A call, in the terms of a graph's node. `after`: the last node at the time."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: fx.Node | None

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph) -> RecordedCall | None:
        """The call that `__torch_function__` sees; None for a write of a property."""
        name = getattr(func, "__name__", "")
        if name in ("__set__", "__delete__"):
            return None
        after = next(iter(reversed(graph.nodes)), None)
        if name == "__get__":
            return cls("call_function", getattr, (args[0], func.__self__.__name__), {}, after)
        if name in ("__getitem__", "__setitem__"):
            return cls("call_function", getattr(operator, name.strip("_")), args, kwargs, after)
        if func in _tensor_methods():
            return cls("call_method", name, args, kwargs, after)
        return cls("call_function", func, args, kwargs, after)


@cache
def _tensor_methods() -> frozenset[Any]:
    # `torch.overrides.is_tensor_method_or_property` asks the same, after 20 ms of preparation.
    # A trace patches some methods of the class, and not those of its base.
    members = chain(vars(torch.Tensor).values(), vars(torch.Tensor.__mro__[1]).values())
    return frozenset(member for member in members if member.__hash__ is not None)


class TensorProvenance:
    """The call that made each tensor, by id; `parameters`, the tensors that modules
    hold, have nodes of their own."""

    def __init__(self, tracer: fx.Tracer, parameters: Container[int]) -> None:
        self.tracer, self.parameters = tracer, parameters
        self.calls: dict[int, RecordedCall] = {}
        self.parts: dict[int, tuple[RecordedCall, int]] = {}  # of a tuple: the call that returned it, and the index
        self.references: list[torch.Tensor] = []  # keeps tensors alive, so that ids stay unique
        self.nodes: dict[int, fx.Node] = {}
        self.call_nodes: dict[int, fx.Node] = {}
        self.next_nodes: dict[fx.Node, fx.Node] = {}  # behind a node, before anything was inserted there
        self.calls_on: dict[int, list[RecordedCall]] = {}  # by storage: what reads, returns or writes it
        self.writes: dict[int, frozenset[int]] = {}  # by call: the storages that it changes
        self.written = set[int]()  # storages
        self.held = set[int]()  # storages of parameters
        self.open = set[int]()  # storages whose nodes are being created

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.calls or id(tensor) in self.parts

    def record(self, call: RecordedCall, result: Any, written: Sequence[torch.Tensor] = ()) -> None:
        """Records a call that returned `result`, and has changed some of its arguments in place."""
        if isinstance(result, torch.Tensor):
            # a no-op, as `x.float()` of float32, returns its argument
            if result not in self and id(result) not in self.nodes and id(result) not in self.parameters:
                self.calls[id(result)] = call
                self.references.append(result)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                if isinstance(part, torch.Tensor) and part not in self:  # `broadcast_tensors` returns its arguments
                    self.parts[id(part)] = (call, i)
                    self.references.append(part)
        tensors = [t for t in leaves((call.args, call.kwargs, result)) if isinstance(t, torch.Tensor)]
        for storage in {storage_id(t) for t in tensors}:
            self.calls_on.setdefault(storage, []).append(call)
        if written:
            self.record_writes(call, written)

    def record_writes(self, call: RecordedCall, written: Sequence[torch.Tensor]) -> None:
        self.writes[id(call)] = storages = frozenset(map(storage_id, written))
        with_nodes = any(id(call) in self.call_nodes for storage in storages for call in self.calls_on[storage])
        self.written |= storages
        if with_nodes or storages & self.held:
            for storage in storages:
                self.create_nodes_on(storage)

    def depends_on_parameters(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded tensor is computed from parameters, not from constants alone."""
        pending, seen = [tensor], set[int]()
        while pending:
            one = pending.pop()
            if id(one) in self.parameters or storage_id(one) in self.held:
                return True
            if id(one) in seen or one not in self:
                continue
            seen.add(id(one))
            call = self.parts[id(one)][0] if id(one) in self.parts else self.calls[id(one)]
            pending += [t for t in leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
        return False

    def create_nodes_on(self, storage: int) -> None:
        """Creates the nodes of all calls so far on memory that is written, in their order."""
        if storage in self.written - self.open:
            self.open.add(storage)
            for call in self.calls_on[storage]:
                self.call_node(call)
            self.open.discard(storage)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node for a recorded tensor, created with those that it depends on."""
        self.create_nodes_on(storage_id(tensor))
        if id(tensor) not in self.nodes:
            if id(tensor) in self.parts:
                call, index = self.parts[id(tensor)]
                source = self.call_node(call)
                node = self.tracer.create_node("call_function", operator.getitem, (source, index), {})
            else:
                node = self.call_node(self.calls[id(tensor)])
            node.meta["example"] = tensor
            self.nodes[id(tensor)] = node
        return self.nodes[id(tensor)]

    def call_node(self, call: RecordedCall) -> fx.Node:
        if id(call) in self.call_nodes:
            return self.call_nodes[id(call)]
        with self.insertion_point(call):
            arguments: list[Any] = [self.tracer.create_arg(call.args), self.tracer.create_arg(call.kwargs)]
            if id(call) not in self.call_nodes:  # an argument in memory that is written may have created it
                self.call_nodes[id(call)] = node = self.tracer.create_node(call.kind, call.target, *arguments)
                if id(call) in self.writes:
                    node.meta[WRITES] = self.writes[id(call)]
        return self.call_nodes[id(call)]

    def insertion_point(self, call: RecordedCall) -> contextlib.AbstractContextManager[Any]:
        """The first use; where there are `with` blocks, the place of the call in the code."""
        graph = self.tracer.graph
        if call.after is None or not any(node.target is enter_context for node in graph.nodes):
            return contextlib.nullcontext()
        return graph.inserting_before(self.next_nodes.setdefault(call.after, call.after.next))

    def chunk_source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The source of `tensor` if several were concatenated and chunked again, or itself."""
        split, index = self.parts.get(id(tensor), (None, 0))
        if split is None or split.target != "chunk":
            return tensor
        join = self.calls.get(id(split.args[0]))
        if join is None or join.target is not torch.cat or storage_id(tensor) in self.written:
            return tensor
        sources: Any = join.args[0]
        is_inverse = {s.shape for s in sources} == {tensor.shape} and split.args[1:] == (len(sources),)
        return sources[index] if is_inverse else tensor
