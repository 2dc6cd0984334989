"""Adds nodes to a graph at an insertion point."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from peftc.addressing.sites import Slice
from peftc.dataflow.nodes import EDIT
from peftc.runtime.parameters import Rows, rows_of, with_rows


class NodeBuilder:
    """Inserts nodes one after the other. The insertion point moves behind each new node and behind
    each operand.

    Args: `numbers`: numbers the nodes of all edits of a graph; the paths of a forward know common
    nodes by them.
    """

    def __init__(self, graph: fx.Graph, numbers: Iterator[int]) -> None:
        self.graph, self.numbers = graph, numbers
        self.point = next(iter(graph.nodes))
        self.nodes: list[fx.Node] = []

    def start_after(self, node: fx.Node) -> None:
        self.point = node
        while self.point.op == "placeholder" and self.point.next.op == "placeholder":
            self.point = self.point.next

    def start_before(self, node: fx.Node) -> None:
        self.start_after(node.prev)

    def move_after(self, operand: fx.Node) -> None:
        """Moves the insertion point behind an operand of later nodes."""
        if operand.op != "placeholder" and self.point < operand:
            self.point = operand

    def add(self, node: fx.Node) -> fx.Node:
        node.meta["origin"] = (EDIT, next(self.numbers), 0)
        self.point.append(node)
        self.point = node
        self.nodes.append(node)
        return node

    def function(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.add(self.graph.call_function(target, args))

    def method(self, name: str, *args: Any) -> fx.Node:
        return self.add(self.graph.call_method(name, args))

    def module(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        return self.add(self.graph.create_node("call_module", name, args, kwargs))

    def copy(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> fx.Node:
        """The same operation, with some operands replaced."""
        return self.add(self.graph.node_copy(node, lambda n: operands.get(n, n)))

    def take_rows(self, value: Any, rows: Slice, dim: int, width: int) -> fx.Node:
        if rows.count > 1:
            return self.function(rows_of, value, dim, *row_arguments(rows, width))
        index = slice(rows.start, rows.stop)
        return self.function(operator.getitem, value, (..., index) if dim == -1 else index)

    def put_rows(self, value: fx.Node, rows: Slice, new: Any, dim: int, width: int) -> fx.Node:
        if rows.count > 1:
            return self.function(with_rows, value, new, dim, *row_arguments(rows, width))
        parts: list[Any] = [new]
        if rows.start > 0:
            parts.insert(0, self.take_rows(value, Slice(0, rows.start), dim, width))
        if rows.stop < width:
            parts.append(self.take_rows(value, Slice(rows.stop, width), dim, width))
        return self.function(torch.cat, parts, dim)


def row_arguments(rows: Slice, width: int) -> Rows:
    """Interleaved rows as the arguments of `rows_of`."""
    base = rows.base(width)
    return base, rows.count, rows.stride, rows.start - base, rows.stop - base
