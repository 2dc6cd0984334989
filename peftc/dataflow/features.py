"""Which output features of a Linear a value is made of.

The features are numbered, and what the model's code does to their layout (views, splits, slices,
permutations) is done to the numbers. A fused q, k, v thus gives the right rows in whatever order a
model keeps them: one block each, or interleaved head by head.
"""

import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, is_tensor, shape
from peftc.dataflow.numbers import as_slice, distinct, numbered, varies
from peftc.dataflow.operations import LAYOUT, Op, dim_of, is_in_place, name_of, op_of, rerun
from peftc.dataflow.values import cache_update, reaches, upstream, value_operands
from peftc.fakes.data_answers import tensors_in


def source_linears(
    layer: LayerGraph, value: fx.Node, *others: fx.Node, ends: Collection[fx.Node] = ()
) -> list[tuple[fx.Node, Slice | None]]:
    """The nearest Linears upstream of values, each with the rows that go there; None: all rows.
    `ends`: nodes behind which no Linear counts.
    """
    key = (value, others, frozenset(ends))
    if key not in layer.sources:
        layer.sources[key] = _source_linears(layer, (value, *others), ends)
    return [*layer.sources[key]]


def _source_linears(
    layer: LayerGraph, values: tuple[fx.Node, ...], ends: Collection[fx.Node]
) -> list[tuple[fx.Node, Slice | None]]:

    def stops(node: fx.Node) -> bool:
        return node in ends or (layer.is_linear(node) and not sums_tokens(node, layer))

    behind = {n for v in values for n in upstream(v, stops)}
    linears = [n for n in layer.linears(behind) if not sums_tokens(n, layer)]
    between = sorted(behind - set(linears))
    sources: list[tuple[fx.Node, Slice | None]] = []
    for linear in linears:
        width = layer.width(linear)
        if (features := _features_in(linear, between, values, layer)) is None:
            sources.append((linear, None))
        elif rows := as_slice(features, width):
            sources.append((linear, rows if rows.width < width else None))
    return sources


def sums_tokens(linear: fx.Node, layer: LayerGraph) -> bool:
    """Whether a Linear sums over another dimension than that of the features of one before it."""
    # Seen in: no transformers model, but the keys of Linformer
    known = layer.over_tokens
    if linear not in known:
        source = layer.input_of(linear)
        before = layer.linears(set(upstream(source, layer.is_linear))) if source is not None else []
        known[linear] = False
        if source is not None and len(before) == 1 and is_only_layout(source, before[0], layer):
            dims, product = dims_of(source, layer), layer.product(linear)
            own = layer.feature_dims(linear).features if product is None else product.d_in.features
            known[linear] = bool(dims) and dims.isdisjoint(own)
    return known[linear]


def is_only_layout(value: fx.Node, linear: fx.Node, layer: LayerGraph) -> bool:
    """Whether nothing but layout stands between a Linear and a value."""
    behind = set(upstream(value, lambda n: n is linear)) - {linear}
    return all(layer.passes_through(n) is not None or _is_layout(n) for n in behind)


def is_affine(value: fx.Node, linear: fx.Node, layer: LayerGraph) -> bool:
    """Whether no activation stands between a Linear and a value."""
    # Seen in: GPT-OSS, DeepSeek V4, MiniMax M3
    paths = {n for n in upstream(value, lambda n: n is linear) if n is linear or reaches(linear, n)}

    def keeps_sign(node: fx.Node) -> bool:
        if layer.passes_through(node) is not None or _is_layout(node) or layer.op(node) is Op.CONVOLUTION:
            return True
        return layer.op(node) in (Op.ADD, Op.MUL) and sum(n in paths for n in value_operands(node)) == 1

    return all(n is linear or keeps_sign(n) for n in paths)


def dims_of(value: fx.Node, layer: LayerGraph) -> set[int]:
    """The dimensions of a value that tell features of a Linear apart; none where unknown."""
    if value not in layer.feature_dims_of:
        layer.feature_dims_of[value] = _dims_of(value, layer)
    return {*layer.feature_dims_of[value]}


def _dims_of(value: fx.Node, layer: LayerGraph) -> set[int]:
    behind = set(upstream(value, layer.is_linear))
    linears = layer.linears(behind)
    if len(linears) != 1:
        return set()
    with unset_fake_temporarily():
        numbers = _numbers_of(linears[0], layer)
        for node in sorted(behind - set(linears)):
            sources = [n for n in value_operands(node) if n in numbers]
            if sources and (moved := move_numbers(node, sources, numbers)) is not None:
                numbers[node] = moved
        moved = numbers.get(value)
        if not isinstance(moved, torch.Tensor):
            return set()
        return {dim for dim in range(moved.ndim) if varies(moved, dim)}


def separates(value: fx.Node, dim: int, layer: LayerGraph) -> bool:
    """Whether features of a Linear may be in a dimension of a value."""
    # Seen in: XCiT (features attend to features), where prefixes would be features
    dims = dims_of(value, layer)
    return not dims or dim % len(shape(value)) in dims or shape(value)[dim] == 1


def move_numbers(node: fx.Node, sources: list[fx.Node], numbers: Mapping[fx.Node, Any]) -> Any:
    """The numbers of `sources` after an operation that moves entries; None if it computes."""
    if len(sources) == 1 and _keeps_entries(node, sources[0]):
        return numbers[sources[0]]
    if any(source not in node.all_input_nodes for source in sources):
        return None  # one of several results of a leaf
    if name_of(node) == "pad":
        return _padded_numbers(node, numbers[sources[0]])
    joins = op_of(node) is Op.JOIN and all(n in numbers for n in node.all_input_nodes if is_tensor(n))
    if not joins and not _is_layout(node) and not _cuts_windows(node):
        return None
    args = fx.map_arg(node.args, lambda n: numbers.get(n, example(n)))
    kwargs = fx.map_arg(node.kwargs, lambda n: numbers.get(n, example(n)))
    moved = None
    with contextlib.suppress(RuntimeError, TypeError, IndexError):  # the numbers lack what the operation needs
        try:
            moved = rerun(node, args, kwargs)
        except RuntimeError:  # a view of tensors that repeat entries
            contiguous = partial(tree_map_only, torch.Tensor, torch.Tensor.contiguous)
            moved = rerun(node, contiguous(args), contiguous(kwargs))
    return None if any(isinstance(m, FakeTensor) for m in tensors_in(moved)) else moved


def _padded_numbers(node: fx.Node, numbers: Any) -> torch.Tensor | None:
    """The numbers of a tensor after positions are put around it; None where features are."""
    # Seen in: no transformers model, but HaloNet, whose keys and values are of overlapping windows
    if not isinstance(numbers, torch.Tensor) or numbers.ndim != len(shape(node)):
        return None
    for dim, size in enumerate(shape(node)):
        if size != numbers.shape[dim]:
            if varies(numbers, dim):
                return None
            numbers = numbers.narrow(dim, 0, 1)
    return numbers.expand(shape(node))


def follow_numbers(node: fx.Node, source: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
    """As `move_numbers`, of any operation but a product, too: each dimension that keeps its size
    keeps its numbers.
    """
    # Seen in: no transformers model, but attention over coarser and coarser blocks
    moved, own, sizes = move_numbers(node, [source], numbers), numbers[source], shape(node)
    if moved is not None or not isinstance(own, torch.Tensor) or op_of(node) in (Op.MATMUL, Op.LINEAR):
        return moved
    over = dim_of(node, default=0)
    if op_of(node) is Op.SUM and len(sizes) == own.ndim - 1 and isinstance(over, int):
        own = own.select(over, 0)
    elif op_of(node) is Op.JOIN and len(sizes) == own.ndim + 1 and isinstance(over, int):
        own = own.unsqueeze(over)
    if own.ndim != len(sizes):
        return None
    for dim, size in enumerate(sizes):
        own = own if own.shape[dim] == size else own.narrow(dim, 0, 1)
    return own.expand(sizes)


def _features_in(
    linear: fx.Node, between: list[fx.Node], values: tuple[fx.Node, ...], layer: LayerGraph
) -> torch.Tensor | None:
    """The numbers of the features of `linear` that `values` depend on; None where unknown."""
    numbers = _numbers_of(linear, layer)
    used: list[torch.Tensor] = []
    for node in between:
        sources = [n for n in value_operands(node) if n in numbers]
        if not sources:
            continue
        mixes = is_in_place(node) or layer.mixes_features(node)
        moved = None if mixes else move_numbers(node, sources, numbers)
        if moved is not None:
            numbers[node] = moved
            continue
        for source in sources:
            if not isinstance(numbers[source], torch.Tensor):
                return None
            used.append(numbers[source])
    used += [numbers[v] for v in values if isinstance(numbers.get(v), torch.Tensor)]
    entries = [distinct(numbers).reshape(-1) for numbers in used]
    return torch.cat(entries).bincount().nonzero()[:, 0] if used else None  # faster than `unique`


def _numbers_of(linear: fx.Node, layer: LayerGraph) -> dict[fx.Node, Any]:
    """The numbers of the features of a Linear, in the shape of its result."""
    return {linear: numbered(shape(linear), layer.feature_dims(linear).features)}


def _is_layout(node: fx.Node) -> bool:
    return op_of(node) in LAYOUT or op_of(node) is Op.ITEM or name_of(node) == "contiguous"


def _cuts_windows(node: fx.Node) -> bool:
    """Whether a node is a view of a tensor as windows, which may overlap."""
    return name_of(node) == "unfold" and node.target is not torch.nn.functional.unfold


def _keeps_entries(node: fx.Node, source: fx.Node) -> bool:
    """Whether entries stay where they are: in a cache's update, or element by element."""
    if cache_update(node) is not None:
        return True
    inside = source not in node.all_input_nodes  # one of several results of a leaf
    if not is_tensor(source) or not is_tensor(node) or shape(source) != shape(node):
        return False
    return (inside or not _is_layout(node)) and op_of(node) is not Op.MATMUL
