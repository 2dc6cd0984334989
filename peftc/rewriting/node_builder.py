"""Adds nodes to a graph at an insertion point, and edits of matrices stacked in one parameter."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from peftc.addressing.sites import Slice, WeightRef, parameter_name
from peftc.dataflow.nodes import EDIT, is_edit
from peftc.rewriting.edits import RegionState
from peftc.runtime.layouts import features_last, image_to_tokens
from peftc.runtime.parameters import Rows, as_matrix, rows_of, stacked_slice, with_rows, with_stacked_slices


class NodeBuilder:
    """Inserts nodes one after the other, behind each new node and behind each operand.

    Args: `numbers`: of the nodes of all edits; the paths of a forward know common nodes by them.
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

    def own_rows(self, form: str | None, new: Any, state: str, read: Callable[[str], Any]) -> Any:
        """The new value of a state in rows whose adapter has an edit, the old one in others.

        Args: `form`: where the region has a form of the edit; None if no attached adapter has it.
        """
        if form is None:
            return new
        old = read(state)
        match new:
            case fx.Node(target="added_to", args=(fx.Node(target=own), before, *_)) if own == form and before is old:
                new.target = "added_to_own"
                return new
            case _:
                pass
        return self.method("own_rows", self.add(self.graph.get_attr(form)), new, old)

    def take_rows(self, value: Any, rows: Slice, dim: int, size: int) -> fx.Node:
        if rows.count > 1:
            return self.function(rows_of, value, dim, *row_arguments(rows, size))
        index = slice(rows.start, rows.stop)
        return self.function(operator.getitem, value, (..., index) if dim == -1 else index)

    def put_rows(self, value: fx.Node, rows: Slice, new: Any, dim: int, size: int) -> fx.Node:
        if rows.count > 1:
            return self.function(with_rows, value, new, dim, *row_arguments(rows, size))
        parts: list[Any] = [new]
        if rows.start > 0:
            parts.insert(0, self.take_rows(value, Slice(0, rows.start), dim, size))
        if rows.stop < size:
            parts.append(self.take_rows(value, Slice(rows.stop, size), dim, size))
        return self.function(torch.cat, parts, dim)

    def with_features_last(self, node: fx.Node, state: RegionState) -> fx.Node:
        """A state as (batch, …, tokens, features)."""
        if state.image and state.kernel is None:
            return self.function(image_to_tokens, node, state.image == "channels first")
        return (
            node if state.dims is None else self.function(features_last, node, state.dims.tokens, state.dims.features)
        )

    def matrix(self, stored: fx.Node, weight: WeightRef) -> fx.Node:
        """A parameter as (out, in)."""
        if weight.layout is not None:
            return self.function(as_matrix, stored, weight.layout.order, weight.layout.rows)
        return self.method("t", stored) if weight.transposed else stored


def row_arguments(rows: Slice, size: int) -> Rows:
    """Interleaved rows as the arguments of `rows_of`."""
    base = rows.base(size)
    return base, rows.count, rows.stride, rows.start - base, rows.stop - base


class StackedWeight:
    """One matrix of a stacked parameter. New values share a node unless one replaces another."""

    def __init__(self, builder: NodeBuilder, state: RegionState, latest: Callable[[fx.Node], fx.Node]) -> None:
        assert state.weight is not None
        assert state.weight.stacked_slice is not None
        self.builder, self.size = builder, state.size
        self.weight, self.slice = state.weight, state.weight.stacked_slice
        name = parameter_name(state.weight)
        self.node = latest(next(n for n in builder.graph.nodes if n.op == "get_attr" and n.target == name))

    @property
    def key(self) -> tuple[int, Rows | None]:
        """The matrix and its rows, as `with_stacked_slices` takes them."""
        rows = self.weight.rows
        if rows is None:
            return self.slice.index, None
        one = (rows.start, 1, rows.width, 0, rows.width)
        return self.slice.index, one if rows.count == 1 else row_arguments(rows, self.size)

    def is_unchanged_by(self, node: fx.Node) -> bool:
        """Whether a node replaces other matrices of the parameter only."""
        return node.target is with_stacked_slices and self.key not in node.args[3]  # pyright: ignore[reportOperatorIssue]

    def read(self) -> fx.Node:
        node: Any = self.node
        while self.is_unchanged_by(node):
            node = node.args[0]
        self.builder.move_after(node)
        return self.builder.function(stacked_slice, node, self.slice.count, self.slice.index)

    def write(self, value: Callable[[], Any]) -> fx.Node:
        """Inserts a new value. Returns: the node of the whole parameter."""
        if self.is_unchanged_by(self.node):
            self.builder.start_before(self.node)
            new = value()
            whole, count, transposed, keys, values = self.node.args
            self.node.args = (whole, count, transposed, [*keys, self.key], [*values, new])  # pyright: ignore
            if self.node < self.builder.point:
                self.builder.point.append(self.node)
            return self.node
        self.builder.start_after(self.node)
        arguments = (self.node, self.slice.count, self.weight.transposed, [self.key], [value()])
        parameter = self.builder.function(with_stacked_slices, *arguments)
        self.node.replace_all_uses_with(parameter, delete_user_cb=lambda user: not is_edit(user))
        return parameter
