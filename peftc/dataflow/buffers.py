"""Tensors that code fills piece by piece: which value a part of such a buffer is.

qkv = x.new_empty(…)        q = qkv[..., :d]        q is `self.q(x)`
qkv[..., :d] = self.q(x)    buffer[0].copy_(self.q(x))
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.operations import LAYOUT, Op, op_of, rerun
from peftc.tracing.operations import new_version


def written_value(node: fx.Node) -> fx.Node | None:
    """The value that code has written into the part of a buffer that `node` selects, and nothing
    but it; None for any other node.
    """
    if not node.graph.find_nodes(op="call_function", target=new_version, sort=False):  # nearly all graphs
        return None
    path = list(_views(node))
    versions = [n for n in path if n.target is new_version]
    writes = sorted({write for version in versions for write in version.args[1:] if isinstance(write, fx.Node)})
    if not writes or not is_tensor(path[-1]):
        return None
    values = [_value_of(write) for write in writes]
    targets = [list(_views(target)) for write in writes if isinstance(target := write.args[0], fx.Node)]
    # a write to another tensor on the same memory has no place in this one
    if any(value is None for value in values) or any(target[-1] is not path[-1] for target in targets):
        return None
    try:
        with unset_fake_temporarily():
            return _only_value(_along(path, _numbers(writes, values, targets)), values)
    except (RuntimeError, TypeError, IndexError, ValueError):  # an index that is no number
        return None


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """`node` and what it is a view, or a version, of."""
    current: fx.Node | None = node
    while current is not None:
        yield current
        is_view = op_of(current) in LAYOUT or op_of(current) is Op.ITEM or current.target is new_version
        current = first_input(current) if is_view else None


def _value_of(write: fx.Node) -> fx.Node | None:
    """What an assignment to an index, or a `copy_`, writes."""
    index = 2 if write.target is operator.setitem else 1 if write.target == "copy_" else len(write.args)
    value = write.args[index] if index < len(write.args) else None
    return value if isinstance(value, fx.Node) and is_tensor(value) else None


def _numbers(writes: list[fx.Node], values: list[Any], targets: list[list[fx.Node]]) -> torch.Tensor:
    """A buffer in which all values have been written, with their entries numbered in order."""
    numbers, start = torch.full(shape(targets[0][-1]), -1), 0
    for write, value, target in zip(writes, values, targets, strict=True):
        own = torch.arange(start, start + prod(shape(value))).view(shape(value))
        start += own.numel()
        if write.target is operator.setitem:
            _along(target, numbers)[_examples(write.args[1])] = own
        else:
            _along(target, numbers).copy_(own)
    return numbers


def _along(path: list[fx.Node], numbers: Any) -> Any:
    """The numbers of a buffer after the views of a path, whose last node is the buffer."""
    for source, view in pairwise(reversed(path)):
        if view.target is not new_version:
            numbers = rerun(view, *(_examples(part, source, numbers) for part in (view.args, view.kwargs)))
    return numbers


def _examples(arguments: Any, source: fx.Node | None = None, numbers: Any = None) -> Any:
    """The arguments of a call: the numbers for their source, and examples for other nodes."""
    return fx.map_arg(arguments, lambda n: cast(Any, numbers if n is source else example(n)))


def _only_value(numbers: Any, values: list[Any]) -> fx.Node | None:
    """The value of which the numbers are all entries, in order."""
    if not isinstance(numbers, torch.Tensor):  # the parts of a split, together
        return None
    start = 0
    for value in values:
        size = prod(shape(value))
        if torch.equal(numbers.reshape(-1), torch.arange(start, start + size)):
            return value
        start += size
    return None
