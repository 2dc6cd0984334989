"""Where features are: which output features of a Linear a value is made of, and in which dimension.

The features are numbered, and what the model's code does to their layout (views, splits, slices,
permutations) is done to the numbers. A fused q, k, v thus gives the right rows in whatever order a
model keeps them: one block each, or interleaved head by head.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.matrices import parameter_of
from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.numbers import as_slice, distinct, numbered, varies
from peftc.dataflow.operations import LAYOUT, Op, dim_of, is_in_place, name_of, op_of, rerun
from peftc.dataflow.values import cache_update, reaches, upstream, value_operands, value_users
from peftc.fakes.tensors import tensors_in

CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)


def source_linears(
    layer: LayerGraph, value: fx.Node, *others: fx.Node, ends: Collection[fx.Node] = ()
) -> list[tuple[fx.Node, Slice | None]]:
    """The nearest Linears upstream of values, each with the rows that go there; None: all rows.
    `ends`: nodes behind which no Linear counts.
    """
    values = (value, *others)

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
    joins = op_of(node) is Op.JOIN and all(n in numbers for n in node.all_input_nodes if is_tensor(n))
    if not joins and not _is_layout(node):
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


def _keeps_entries(node: fx.Node, source: fx.Node) -> bool:
    """Whether entries stay where they are: in a cache's update, or element by element."""
    if cache_update(node) is not None:
        return True
    inside = source not in node.all_input_nodes  # one of several results of a leaf
    if not is_tensor(source) or not is_tensor(node) or shape(source) != shape(node):
        return False
    return (inside or not _is_layout(node)) and op_of(node) is not Op.MATMUL


def dim_before(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """The dimension of an operand that becomes `dim` of the result; None without a single one."""
    old, new = shape(source), shape(node)
    match op_of(node):
        case Op.PERMUTE:
            order = _order(node, len(old))
            return None if order is None else order[dim]
        case Op.RESHAPE:
            same = [i for i in range(len(old)) if (old[i], prod(old[i + 1 :])) == (new[dim], prod(new[dim + 1 :]))]
            return same[0] if len(same) == 1 else None
        case _:
            return dim if len(old) == len(new) else None


def _order(node: fx.Node, size: int) -> list[int] | None:
    """The dimensions of the operand in the order of the result."""
    if len(node.all_input_nodes) > 1:  # dimensions that are computed
        return None
    lengths = torch.empty(tuple(range(2, size + 2)), device="meta")
    permuted = getattr(lengths, name_of(node))
    if not isinstance(permuted, torch.Tensor):
        arguments = [a for a in node.args if not isinstance(a, fx.Node)]
        permuted = permuted(*arguments, **{k: v for k, v in node.kwargs.items() if k != "input"})
    return [n - 2 for n in permuted.shape]


def features_dim(node: fx.Node, layer: LayerGraph) -> int:
    """The dimension of the features: the last, or the second of what convolutions read."""
    last = max(0, len(shape(node)) - 1)
    # an image may also come from tokens, and go to convolutions of another layer (RT-DETR's AIFI)
    if last < 2 or (last < 3 and not any(isinstance(m, CHANNELS_FIRST) for m in layer.root.modules())):
        return last
    dim = _dim_of_producer(node, layer, set())
    dim = _dim_of_consumer(node, layer, set()) if dim is None else dim
    return last if dim is None else dim


def dim_of_input(call: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of the features in what a call of a module reads; None where the module does
    not tell.
    """
    source = first_input(call)
    keeps_rank = source is not None and is_tensor(call) and len(shape(source)) == len(shape(call))
    return _own_dim(call, layer) if keeps_rank else None


def stream_dim(values: Collection[fx.Node], layer: LayerGraph) -> int | None:
    """The dimension of the features in sums of a residual stream, by what reads these; None where
    nothing tells. What is added to them may have been computed over tokens.
    """
    # Seen in: no transformers model, but MLP-Mixer as convolutions whose channels are tokens
    dims = dims_of_readers(values, layer)
    return dims.pop() if len(dims) == 1 else None


def dims_of_readers(values: Iterable[fx.Node], layer: LayerGraph) -> set[int]:
    """The dimensions in which what directly reads some values has features; one where a norm or a
    scale tells.
    """
    dims = set[int]()
    for value in values:
        for user in filter(is_tensor, value_users(value)):
            own = _own_dim(user, layer) if first_input(user) is value or layer.op(user) is Op.MUL else None
            if own is not None and (layer.is_norm(user) or layer.op(user) is Op.MUL):
                return {own}
            dims |= set() if own is None else {own}
    return dims


def _dim_of_producer(node: fx.Node, layer: LayerGraph, seen: set[fx.Node]) -> int | None:
    seen.add(node)
    if (own := _own_dim(node, layer)) is not None:
        return own
    for source in value_operands(node):
        if source in seen or not _keeps_features(source, node):
            continue
        dim = _dim_of_producer(source, layer, seen)
        if dim is None and source.op == "placeholder":
            dim = _dim_of_consumer(source, layer, {*seen, node})
        if dim is not None:
            dims = [i for i in range(len(shape(node))) if dim_before(node, source, i) == dim]
            return dims[0] if len(dims) == 1 else None
    return None


def _dim_of_consumer(node: fx.Node, layer: LayerGraph, seen: set[fx.Node]) -> int | None:
    # Seen in: BiT, EfficientNet, Florence-2, SwiftFormer
    seen.add(node)
    for user in value_users(node):
        if user in seen or not is_tensor(user):
            continue
        reads = first_input(user) is node if user.op == "call_module" else layer.op(user) is Op.MUL
        if reads and (own := _own_dim(user, layer)) is not None:
            return own
        if not _keeps_features(node, user):
            continue
        if op_of(user) is Op.ADD and (dim := _dim_of_producer(user, layer, seen)) is not None:
            return dim  # of the other operand
        if (dim := _dim_of_consumer(user, layer, seen)) is not None:
            return dim_before(user, node, dim)
    return None


def _own_dim(node: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of the features in what a module, or a scale, reads and returns."""
    module, sizes = layer.module(node), shape(node)
    if isinstance(module, CHANNELS_FIRST):
        return 1
    if isinstance(module, nn.LayerNorm) and inspect.unwrap(type(module).forward) is not nn.LayerNorm.forward:
        dims = [dim for dim in {1, len(sizes) - 1} if sizes[dim] == module.normalized_shape[-1]]
        return dims[0] if len(dims) == 1 else None  # it may permute them itself
    if isinstance(module, nn.LayerNorm) or layer.is_linear(node):
        return len(sizes) - 1
    return _dim_of_scale(node, layer)


def _dim_of_scale(node: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension in which a value is scaled by a parameter that has one for each of its own."""
    # Seen in: no transformers model, but the affine maps of ResMLP
    if node.op == "call_module":
        factors = [p.shape for p in layer.module(node).parameters()] if layer.op(node) is Op.NORM else []  # pyright: ignore
    else:
        others = [n for n in value_operands(node) if layer.op(node) is Op.MUL and parameter_of(n) is not None]
        factors = [shape(n) for n in others]
    dims = [[dim for dim, size in enumerate(sizes) if size > 1] for sizes in factors]
    is_one = all(len(sizes) == len(shape(node)) for sizes in factors) and all(len(own) == 1 for own in dims)
    return dims[0][0] if is_one and len({own[0] for own in dims}) == 1 else None


def _keeps_features(source: fx.Node, node: fx.Node) -> bool:
    if not is_tensor(source) or not is_tensor(node):
        return False
    return shape(source) == shape(node) or op_of(node) in (Op.PERMUTE, Op.RESHAPE)


def softmax_dim(softmax: fx.Node, scores: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of `scores`, a product, over which a softmax sums to one; None if unknown."""
    # Seen in: attentions that multiply keys by queries, as sparse ones do; roles would be swapped
    node, dim = first_input(softmax), softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    size, dim = len(shape(node)), getattr(layer.module(softmax), "dim", dim)
    dim = -1 if dim is None else dim
    if node is None or not isinstance(dim, int) or not -size <= dim < size:
        return None
    dim %= size
    while node is not scores:
        sources = [n for n in value_operands(node) if reaches(scores, n)]
        earlier = dim_before(node, sources[0], dim) if len(sources) == 1 else None
        if earlier is None:
            return None
        node, dim = sources[0], earlier
    return dim
