"""Which output features of a Linear a value is made of.

The features of the Linear are numbered, and what the model's code does to their layout (views, splits, chunks, slices,
permutations) is done to the numbers. So a fused q, k, v gives the right rows in whatever order a model keeps them: one block
each, or interleaved head by head.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from peftc.addressing.sites import Slice
from peftc.fakes.tensors import tensors_in
from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import is_cache_part, is_write, value_operands
from peftc.recognition.token_mixing import weighted
from peftc.tracing.ragged_loops import segment

_LAYOUT_METHODS = frozenset(
    [
        *("view", "reshape", "unflatten", "flatten", "contiguous", "squeeze", "unsqueeze"),
        *("transpose", "permute", "movedim", "swapaxes", "swapdims", "t", "flip", "roll"),
        *("split", "split_with_sizes", "tensor_split", "unsafe_split", "chunk", "unsafe_chunk", "unbind"),
        *("narrow", "select", "index_select", "gather", "take_along_dim"),
        *("expand", "repeat", "repeat_interleave"),
    ]
)
_LIKE = {
    "expand_as": "expand",
    "view_as": "view",
    "reshape_as": "reshape",
}  # what takes the shape of its second argument
_LAYOUT_FUNCTIONS = (
    *(operator.getitem, segment),
    *(torch.reshape, torch.unflatten, torch.flatten, torch.squeeze, torch.unsqueeze),
    *(torch.transpose, torch.permute, torch.movedim, torch.swapaxes, torch.swapdims, torch.t, torch.flip, torch.roll),
    *(torch.split, torch.functional.split, torch.split_with_sizes, torch.tensor_split, torch.unsafe_split),
    *(torch.chunk, torch.unsafe_chunk, torch.unbind),
    *(torch.narrow, torch.select, torch.index_select, torch.gather, torch.take_along_dim),
    *(torch.broadcast_to, torch.tile, torch.repeat_interleave),
)
_JOINS = (torch.cat, torch.concat, torch.stack)
_TURNS = ("T", "mT")


IsLinear: TypeAlias = Callable[[fx.Node, nn.Module], bool]


def source_linears(
    value: fx.Node, root: nn.Module, *others: fx.Node, is_linear: IsLinear = nodes.is_linear
) -> list[tuple[fx.Node, Slice | None]]:
    """The nearest Linears upstream of a value, each with the rows of its output that go there, or to one of the `others`
    (None: all).
    """
    values = (value, *others)
    behind = {n for v in values for n in nodes.upstream(v, lambda n: is_linear(n, root))}
    linears = {n for n in behind if is_linear(n, root)}
    inside = sorted(behind - linears)
    found: list[tuple[fx.Node, Slice | None]] = []
    for linear in sorted(linears):
        features = _reaching(linear, inside, values)
        if features is None:
            found.append((linear, None))
        elif rows := blocks(features, _width(linear)):
            found.append((linear, rows if rows.width < _width(linear) else None))
    return found


def untouched(value: fx.Node, linear: fx.Node, root: nn.Module) -> bool:
    """Whether nothing but layout stands between a Linear and a value."""
    behind = set(nodes.upstream(value, lambda n: n is linear))
    return all(n is linear or nodes.passes_through(n, root) is not None or _is_layout(n) for n in behind)


def affine(value: fx.Node, linear: fx.Node, root: nn.Module) -> bool:
    """Whether no activation stands between a Linear and a value: layout, limits, and sums and products with other things."""
    behind = set(nodes.upstream(value, lambda n: n is linear))
    ways = {linear} | {n for n in behind if linear in nodes.upstream(n, lambda m: m is linear)}
    return all(n is linear or _keeps_sign(n, ways, root) for n in ways)


def _keeps_sign(node: fx.Node, ways: set[fx.Node], root: nn.Module) -> bool:
    if nodes.passes_through(node, root) is not None or _is_layout(node) or node.target in ("clamp", "clamp_"):
        return True
    arithmetic = nodes.is_add(node) or node.target in (operator.mul, torch.mul)
    return arithmetic and len([n for n in value_operands(node) if n in ways]) == 1


def blockless(value: fx.Node, linear: fx.Node, root: nn.Module) -> bool:
    """Whether a Linear is what a value comes from alone: no leaf with weights of its own stands between."""
    behind = set(nodes.upstream(value, lambda n: n is linear)) - {linear}
    return not any(weighted(n, root) and not nodes.is_norm(n, root) for n in behind)


def _width(linear: fx.Node) -> int:
    value = nodes.example(linear)
    assert isinstance(value, torch.Tensor)
    return value.shape[-1]


def dims_of(value: fx.Node, root: nn.Module) -> set[int]:
    """The dimensions of a value that tell features of a Linear apart; none where what happens to them cannot be followed."""
    behind = set(nodes.upstream(value, lambda n: nodes.is_linear(n, root)))
    linears = {n for n in behind if nodes.is_linear(n, root)}
    if len(linears) != 1:
        return set()
    (linear,) = linears
    with unset_fake_temporarily():
        numbers = numbers_of(linear)
        for node in sorted(behind - linears):
            given = [n for n in value_operands(node) if n in numbers]
            if given and (made := numbered(node, given, numbers)) is not None:
                numbers[node] = made
        made = numbers.get(value)
        if not isinstance(made, torch.Tensor):
            return set()
        return {dim for dim in range(made.ndim) if bool((made != made.narrow(dim, 0, 1)).any())}


def separates(value: fx.Node, dim: int, root: nn.Module) -> bool:
    """Whether features of a Linear may be in a dimension of a value: not where they are seen to be in others alone."""
    dims = dims_of(value, root)
    return not dims or dim % len(nodes.shape(value)) in dims or nodes.shape(value)[dim] == 1


def numbers_of(linear: fx.Node) -> dict[fx.Node, Any]:
    """The numbers of the features of a Linear, in the shape of its result."""
    output = nodes.example(linear)
    assert isinstance(output, torch.Tensor)
    return {linear: torch.arange(output.shape[-1]).expand(output.shape).clone()}


def _reaching(linear: fx.Node, inside: list[fx.Node], values: tuple[fx.Node, ...]) -> torch.Tensor | None:
    """The numbers of the features of `linear` that `values` depend on; None where that cannot be told."""
    numbers = numbers_of(linear)
    reached: list[torch.Tensor] = []
    for node in inside:
        given = [n for n in value_operands(node) if n in numbers]
        if not given:
            continue
        made = None if is_write(node) else numbered(node, given, numbers)
        if made is not None:
            numbers[node] = made
            continue
        for source in given:
            if not isinstance(numbers[source], torch.Tensor):
                return None
            reached.append(numbers[source])
    reached += [numbers[v] for v in values if isinstance(numbers.get(v), torch.Tensor)]
    if not reached:
        return None
    return torch.cat([r.reshape(-1) for r in reached]).bincount().nonzero()[:, 0]  # in less time than `unique`


def numbered(node: fx.Node, sources: list[fx.Node], numbers: dict[fx.Node, Any]) -> Any:
    """The numbers after one operation that moves what is numbered; None for one that computes with it."""
    if len(sources) == 1 and _hands_on(node, sources[0]):
        return numbers[sources[0]]
    if any(source not in node.all_input_nodes for source in sources):
        return None  # a part of what a leaf returns
    if not _is_layout(node) and not _joins(node, numbers):
        return None
    args = fx.map_arg(node.args, lambda n: numbers.get(n, nodes.example(n)))
    kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, nodes.example(n)))
    try:
        made = _moved(node, args, kwargs)
    except (RuntimeError, TypeError, IndexError):  # of what the numbers have no counterpart
        return None
    return None if any(isinstance(m, FakeTensor) for m in tensors_in(made)) else made  # moved by what has no data


def _moved(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.target in _LIKE:
        return getattr(args[0], _LIKE[str(node.target)])(nodes.shape(node))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _is_layout(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _LAYOUT_METHODS or node.target in _LIKE
    if node.target is getattr:
        return node.args[1] in _TURNS
    return node.op == "call_function" and (node.target in _LAYOUT_FUNCTIONS or is_cache_part(node))


def _joins(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> bool:
    """Whether tensors are put together all of which have numbers."""
    return node.target in _JOINS and all(n in numbers for n in node.all_input_nodes if nodes.is_tensor(n))


def _hands_on(node: fx.Node, source: fx.Node) -> bool:
    """Whether features stay where they are: an operation on one tensor that keeps its shape, or a cache's update."""
    if is_cache_part(node):
        return True
    inside = source not in node.all_input_nodes  # of what returns several results
    before, after = nodes.example(source), nodes.example(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.shape == after.shape and (inside or not _is_layout(node)) and not nodes.is_product(node)


def blocks(features: torch.Tensor, width: int) -> Slice | None:
    """Sorted numbers of features as equal blocks at equal distances; None where they are none."""
    found = list(_runs(features.tolist()))
    lengths, starts = {stop - start for start, stop in found}, [start for start, _ in found]
    strides = {b - a for a, b in itertools.pairwise(starts)}
    if len(lengths) != 1 or len(strides) > 1:
        return None
    start, stop = found[0]
    if not strides:
        return Slice(start, stop)
    stride = strides.pop()
    rows = Slice(start, stop, stride, len(found))
    return rows if stride * len(found) <= width and stop - rows.base(width) <= stride else None


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Where numbers follow each other; none of a slice without features."""
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    for first, behind in itertools.pairwise([0, *breaks, len(numbers)]):
        if first < behind:
            yield numbers[first], numbers[behind - 1] + 1
