"""Where a dimension of one value is in another, and which dimension holds the features."""

from __future__ import annotations

import inspect
from math import prod

import torch
from torch import fx, nn

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input, is_tensor, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import reaches, value_operands, value_users

_CHANNELS_FIRST = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)


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
    if last < 2 or not any(isinstance(m, _CHANNELS_FIRST) for m in layer.root.modules()):
        return last
    dim = _dim_of_producer(node, layer, set())
    dim = _dim_of_consumer(node, layer, set()) if dim is None else dim
    return last if dim is None else dim


def _dim_of_producer(node: fx.Node, layer: LayerGraph, seen: set[fx.Node]) -> int | None:
    seen.add(node)
    if (own := _dim_of_module(node, layer)) is not None:
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
        if user.op == "call_module" and first_input(user) is node and (own := _dim_of_module(user, layer)) is not None:
            return own
        if _keeps_features(node, user) and (dim := _dim_of_consumer(user, layer, seen)) is not None:
            return dim_before(user, node, dim)
    return None


def _dim_of_module(node: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of the features in what a module reads and returns."""
    module, sizes = layer.module(node), shape(node)
    if isinstance(module, _CHANNELS_FIRST):
        return 1
    if isinstance(module, nn.LayerNorm) and inspect.unwrap(type(module).forward) is not nn.LayerNorm.forward:
        dims = [dim for dim in {1, len(sizes) - 1} if sizes[dim] == module.normalized_shape[-1]]
        return dims[0] if len(dims) == 1 else None  # it may permute them itself
    return len(sizes) - 1 if isinstance(module, nn.LayerNorm) or layer.is_linear(node) else None


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
