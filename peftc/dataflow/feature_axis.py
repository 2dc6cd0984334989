"""Which dimension of a value has its features: the code that computes or reads it tells, else it is
the last.
"""

import inspect
from collections.abc import Collection, Iterable
from math import prod

import torch
from torch import fx, nn

from peftc.dataflow.activations import parameter_of
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input, is_tensor, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import reaches, value_operands, value_users
from peftc.modules.walk import modules_in

CHANNELS_FIRST = (
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
    """The dimension of the features: the last, or the second of what convolutions read, and of what
    norms read transposed.
    """
    last = max(0, len(shape(node)) - 1)
    if last < 2:
        return last
    # an image may also come from tokens, and go to convolutions of another layer (RT-DETR's AIFI)
    if last < 3 and not any(isinstance(m, CHANNELS_FIRST) for m in modules_in(layer.root)):
        if layer.is_linear(node) or any(map(layer.is_linear, value_users(node))):
            return last
        dim = _dim_of_norm(node, layer)
        if dim is not None or not _flattens(node, layer):
            return last if dim is None else dim
    dim = _dim_of_producer(node, layer, set())
    dim = _dim_of_consumer(node, layer, set()) if dim is None else dim
    return last if dim is None else dim


def _dim_of_norm(node: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of a value that the nearest norm has features in; None where there is none."""
    # Seen in: no transformers model, but layers of users that transpose before each sub-layer
    dims = {node: list[int | None](range(len(shape(node))))}  # of each value, by those of `node`
    queue = [node]
    for value in queue:  # which grows
        own = _own_dim(value, layer) if layer.is_norm(value) or layer.op(value) is Op.MUL else None
        if own is not None and own in dims[value]:
            return dims[value].index(own)
        for source in value_operands(value):
            if source not in dims and _keeps_dims(source, value, layer):
                before = [dim_before(value, source, dim) for dim in range(len(shape(value)))]
                dims[source] = [None if dim is None else before[dim] for dim in dims[value]]
                queue.append(source)
        for user in value_users(value):
            if user not in dims and _keeps_dims(value, user, layer):
                before = [dim_before(user, value, dim) for dim in range(len(shape(user)))]
                dims[user] = [None if d not in before else before.index(d) for d in dims[value]]
                queue.append(user)
    return None


def _keeps_dims(source: fx.Node, node: fx.Node, layer: LayerGraph) -> bool:
    """Whether the dimensions of an operand are those of the result, or known by a layout."""
    return _keeps_features(source, node) and (layer.op(node) is not Op.MATMUL or layer.is_linear(node))


def _flattens(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether a value is one of more dimensions, reshaped: an image, whose places are one."""
    # Seen in: no transformers model, but CoAtNet
    while (source := layer.passes_through(node)) is not None and len(shape(source)) == len(shape(node)):
        node = source
    return source is not None and len(shape(source)) > len(shape(node))


def dim_of_input(call: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension of the features in what a call of a module reads; None where the module does
    not tell.
    """
    source = first_input(call)
    keeps_rank = source is not None and is_tensor(call) and len(shape(source)) == len(shape(call))
    return _own_dim(call, layer) if keeps_rank else None


def dim_read_by(calls: Iterable[fx.Node], value: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension in which some calls of modules read features of a value; None where they do not
    tell.
    """
    # Seen in: no transformers model, but LocalViT, whose norm is over the rows of images
    dims = {dim_of_input(n, layer) for n in calls if first_input(n) is value and layer.module(n) is not None}
    return dims.pop() if len(dims) == 1 else None


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
            own = _dim_read(user, value, layer)
            if own is not None and (layer.is_norm(user) or layer.op(user) is Op.MUL):
                return {own}
            dims |= set() if own is None else {own}
    return dims


def _dim_read(reader: fx.Node, value: fx.Node, layer: LayerGraph) -> int | None:
    """The dimension in which an operation has the features of what it reads."""
    if (product := layer.product(reader)) is not None:
        return product.d_in.features[0] if product.x is value and len(product.d_in.features) == 1 else None
    return _own_dim(reader, layer) if first_input(reader) is value or layer.op(reader) is Op.MUL else None


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
    """The dimension of the features in what a module, a norm or a scale reads and returns."""
    module, sizes = layer.module(node), shape(node)
    if isinstance(module, CHANNELS_FIRST):
        return 1
    if (product := layer.product(node)) is not None:
        return product.d_out.features[0] if len(product.d_out.features) == 1 else None
    if layer.is_linear(node) or _is_over_last(node, module):
        return len(sizes) - 1
    dim = _dim_of_scale(node, layer)
    if dim is None and module is not None and layer.op(node) is Op.NORM and shape(first_input(node)) == sizes:
        widths = {p.numel() for p in module.parameters()}
        dims = [dim for dim in {1, len(sizes) - 1} if sizes[dim] in widths]
        return dims[0] if len(dims) == 1 else None  # it may permute them itself
    return dim


def _is_over_last(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node is a norm of PyTorch's over the last dimension."""
    own = None if module is None else inspect.unwrap(type(module).forward)
    return own in (nn.LayerNorm.forward, nn.RMSNorm.forward) or name_of(node) in ("layer_norm", "rms_norm")


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
