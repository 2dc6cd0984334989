"""Edits of matrices that are stacked in one parameter: all new ones are put in at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from peftc.addressing.parameter_ranges import parameter_name
from peftc.dataflow.nodes import is_edit
from peftc.rewriting.edits import RegionState
from peftc.rewriting.node_builder import NodeBuilder, row_arguments
from peftc.runtime.parameters import Rows, full_precision, stacked_slice, with_stacked_slices


class StackedWeight:
    """One matrix of a stacked parameter. New values share a node unless one replaces another."""

    def __init__(self, builder: NodeBuilder, state: RegionState, latest: Callable[[fx.Node], fx.Node]) -> None:
        assert state.weight is not None
        assert state.weight.stacked_slice is not None
        self.builder, self.width = builder, state.width
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
        return self.slice.index, one if rows.count == 1 else row_arguments(rows, self.width)

    def is_unchanged_by(self, node: fx.Node) -> bool:
        """Whether a node replaces other matrices of the parameter only."""
        return node.target is with_stacked_slices and self.key not in node.args[3]  # pyright: ignore[reportOperatorIssue]

    def read(self) -> fx.Node:
        node: Any = self.node
        while self.is_unchanged_by(node):
            node = node.args[0]
        self.builder.move_after(node)
        matrix = self.builder.function(stacked_slice, node, self.slice.count, self.slice.index)
        matrix = self.builder.function(full_precision, matrix)
        matrix = self.builder.method("t", matrix) if self.weight.transposed else matrix
        rows = self.weight.rows
        return matrix if rows is None else self.builder.take_rows(matrix, rows, 0, self.width)

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
