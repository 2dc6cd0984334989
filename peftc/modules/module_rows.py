"""Rows that describe the modules of a model: two modules with equal rows are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

Row = tuple[Any, ...]  # of a module: its class, attributes, tensors, children


class Span(NamedTuple):
    """A module in the rows of a model, from its place to the end of what is in it.

    Attributes:
        row: the number of its row.
        objects: the places of the modules and tensors, in the order of the walk.
        tensors: the places of the tensors.
        refers: whether something in it is an object, or is in memory, that was before.
    """

    row: int
    objects: slice
    tensors: slice
    refers: bool


@dataclass(frozen=True, eq=False)
class ModuleRows:
    """The rows of a model, which must not change meanwhile.

    A row is the number of the class, the number of the names and types of attributes, their values,
    then `("tensors", ...)` if there are some, then `("children", name, number of the row, ...)`.

    Attributes:
        rows: equal ones once.
        names: the names of the attributes, by the number in a row.
        spans: of modules with children, by `id`.
        objects: the `id` of all modules and tensors, in order.
        tensors: all parameters and buffers, in order.
        is_plain: whether no module has edits.
    """

    rows: Sequence[Row]
    names: Mapping[int, tuple[str, ...]]
    spans: Mapping[int, Span]
    objects: Sequence[int]
    tensors: Sequence[Tensor]
    is_plain: bool
