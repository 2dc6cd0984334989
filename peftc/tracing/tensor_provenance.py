"""Tensors that the traced code computes from constants and parameters alone, without its arguments.

Python runs such code on plain tensors. Nodes for it are created once one meets a traced value.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.overrides import is_tensor_method_or_property

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
        if is_tensor_method_or_property(func):
            return cls("call_method", name, args, kwargs, after)
        return cls("call_function", func, args, kwargs, after)

    @property
    def is_in_place(self) -> bool:
        name = str(self.target)
        return self.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))


class TensorProvenance:
    """The calls that made and changed each tensor, by id; `parameters` have nodes of their own."""

    def __init__(self, tracer: fx.Tracer, parameters: Container[int]) -> None:
        self.tracer, self.parameters = tracer, parameters
        self.calls: dict[int, list[RecordedCall]] = {}
        self.parts: dict[int, tuple[RecordedCall, int]] = {}  # of a tuple: the call that returned it, and the index
        self.references: list[torch.Tensor] = []  # keeps tensors alive, so that ids stay unique
        self.nodes: dict[int, fx.Node] = {}
        self.call_nodes: dict[int, fx.Node] = {}
        self.next_nodes: dict[fx.Node, fx.Node] = {}  # behind a node, before anything was inserted there

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.calls or id(tensor) in self.parts

    def record(self, call: RecordedCall, result: Any) -> None:
        """Records a call that returned `result`, or has changed it in place."""
        if isinstance(result, torch.Tensor):
            if id(result) in self.calls and not call.is_in_place:
                return  # a no-op, as `x.float()` of float32
            if id(result) not in self.nodes and id(result) not in self.parameters:
                self.calls.setdefault(id(result), []).append(call)
                self.references.append(result)
            elif call.is_in_place:
                self.call_node(call)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
                if isinstance(part, torch.Tensor) and part not in self:  # `broadcast_tensors` returns its arguments
                    self.parts[id(part)] = (call, i)
                    self.references.append(part)

    def node(self, tensor: torch.Tensor) -> fx.Node:
        """The node for a recorded tensor, created with those that it depends on."""
        if id(tensor) in self.nodes:
            return self.nodes[id(tensor)]
        in_place: list[RecordedCall] = []
        if id(tensor) in self.parts:
            call, index = self.parts[id(tensor)]
            node = self.tracer.create_node("call_function", operator.getitem, (self.call_node(call), index), {})
        else:
            call, *in_place = self.calls[id(tensor)]
            node = self.call_node(call)
        node.meta["example"] = tensor
        self.nodes[id(tensor)] = node
        for call in in_place:
            self.call_node(call)
        return node

    def call_node(self, call: RecordedCall) -> fx.Node:
        if id(call) not in self.call_nodes:
            with self.insertion_point(call):
                arguments: list[Any] = [self.tracer.create_arg(call.args), self.tracer.create_arg(call.kwargs)]
                self.call_nodes[id(call)] = self.tracer.create_node(call.kind, call.target, *arguments)
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
        calls = self.calls.get(id(split.args[0]), [])
        if len(calls) != 1 or calls[0].target is not torch.cat:
            return tensor
        sources: Any = calls[0].args[0]
        is_inverse = {s.shape for s in sources} == {tensor.shape} and split.args[1:] == (len(sources),)
        return sources[index] if is_inverse else tensor
