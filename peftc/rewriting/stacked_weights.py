"""Edits of one of several matrices that are one parameter: all the edited ones are put into it at once."""

from __future__ import annotations

from typing import Any, Protocol

from torch import fx

from peftc.addressing.sites import Slice
from peftc.dataflow.nodes import is_edit
from peftc.rewriting.edits import Bound
from peftc.runtime.parameters import full_precision, stacked_slice, with_stacked_slices


class Writer(Protocol):
    """What an equation in the making offers."""

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def inserter(self) -> Any: ...
    @property
    def point(self) -> fx.Node: ...
    def value(self) -> Any: ...
    def start_before(self, node: fx.Node) -> None: ...
    def start_after(self, node: fx.Node) -> None: ...
    def move_after(self, node: fx.Node) -> None: ...
    def function(self, target: Any, *args: Any) -> fx.Node: ...
    def method(self, name: str, *args: Any) -> fx.Node: ...
    def cut(self, node: Any, rows: Slice, dim: int, width: int) -> fx.Node: ...


class StackedWeights:
    """One of the pieces of a parameter in a graph. New values are collected in one `with_slabs`, as long as none of them
    takes the place of another.
    """

    def __init__(self, writer: Writer, bound: Bound) -> None:
        assert bound.weight is not None
        assert bound.weight.stacked_slice is not None
        self.writer, self.ref, self.slab, self.width = writer, bound.weight, bound.weight.stacked_slice, bound.width
        name = f"{self.ref.module}.{self.ref.attribute}".lstrip(".")
        self.parameter = next(n for n in writer.graph.nodes if n.op == "get_attr" and n.target == name)

    @property
    def place(self) -> tuple[int, tuple[int, ...] | None]:
        rows = self.ref.rows
        if rows is None:
            return self.slab.index, None
        one = (rows.start, 1, rows.width, 0, rows.width)
        return self.slab.index, one if rows.count == 1 else layout(rows, self.width)

    def free(self, node: fx.Node) -> bool:
        """Whether a node puts pieces into the parameter, this one not among them."""
        return node.target is with_stacked_slices and self.place not in node.args[3]  # pyright: ignore[reportOperatorIssue]

    def read(self) -> fx.Node:
        node: Any = self.writer.inserter.now(self.parameter)
        while self.free(node):
            node = node.args[0]
        self.writer.move_after(node)
        piece = self.writer.function(stacked_slice, node, self.slab.count, self.slab.index)
        piece = self.writer.function(full_precision, piece)
        piece = self.writer.method("t", piece) if self.ref.transposed else piece
        return piece if self.ref.rows is None else self.writer.cut(piece, self.ref.rows, 0, self.width)

    def write(self) -> None:
        node = self.writer.inserter.now(self.parameter)
        if self.free(node):
            self.writer.start_before(node)
            new = self.writer.value()
            whole, count, transposed, places, values = node.args
            node.args = (whole, count, transposed, [*places, self.place], [*values, new])
            if node < self.writer.point:
                self.writer.point.append(node)
            return
        self.writer.start_after(node)
        new = self.writer.value()
        made = self.writer.function(
            with_stacked_slices, node, self.slab.count, self.ref.transposed, [self.place], [new]
        )
        node.replace_all_uses_with(made, delete_user_cb=lambda user: not is_edit(user))
        self.writer.inserter.latest[node] = made


def layout(rows: Slice, width: int) -> tuple[int, int, int, int, int]:
    """Interleaved rows as the arguments of `rows_of`."""
    base = rows.base(width)
    return base, rows.count, rows.stride, rows.start - base, rows.stop - base
