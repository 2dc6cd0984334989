"""Whether a computation mixes tokens: by attention, convolutions, scans or Linears along tokens."""

import contextlib
import operator
import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn.modules.padding import _ConstantPadNd  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.addressing.sites import FeatureDims
from peftc.dataflow.einsum import is_einsum
from peftc.dataflow.feature_axis import dims_of_readers, features_dim
from peftc.dataflow.features import move_numbers
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, shape
from peftc.dataflow.numbers import distinct, numbered, varies
from peftc.dataflow.operations import Op, dim_of, name_of
from peftc.dataflow.sums import operand_of
from peftc.dataflow.values import changes, reaches, upstream, value_operands
from peftc.observation.first_tensor import first_tensor
from peftc.recognition.attention.patterns import is_scores
from peftc.recognition.residual_stream import Stream, gives_states, selected
from peftc.tracing.operations import autograd_function, new_version, script_function

_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.RNNBase)


def is_weighted(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether a node computes with a parameter of two or more dimensions of several entries."""
    if node.op == "get_attr":
        value = example(node)
        return isinstance(value, nn.Parameter) and sum(n > 1 for n in value.shape) >= 2
    module = layer.module(node)
    return module is not None and any(p.ndim >= 2 for p in module.parameters())


def applies_matrix(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether a node calls a module with a matrix, or multiplies by a bare one."""
    return layer.is_linear(node) or is_weighted(node, layer)


def mixes(body: set[fx.Node], stream: Stream) -> bool:
    """Whether one token's part of a sub-layer's result depends on other tokens."""
    return any(not stream.holds(node) and mixes_tokens(node, stream.layer) for node in body)


def without_earlier_states(body: set[fx.Node], res: fx.Node, stream: Stream) -> set[fx.Node]:
    """The body of a sub-layer without what depends on earlier states of the stream alone: all of
    it, where no weight is behind the state to which the result is added.
    """
    # Seen in: no transformers model, but gates that a layer computes of its input for all parts
    layer, later, earlier = stream.layer, {res}, set[fx.Node]()
    for node in sorted(body - {res}):
        if not later.isdisjoint(node.all_input_nodes) or (stream.holds(node) and reaches(res, node)):
            later.add(node)
        elif stream.holds(node) or not earlier.isdisjoint(node.all_input_nodes):
            earlier.add(node)
    computes = any(applies_matrix(n, layer) for n in later if not layer.is_norm(n))
    return body - earlier if computes else body


def calls_kernel(body: set[fx.Node]) -> bool:
    """Whether a function that has no code to trace combines hidden states: three or more, as an
    attention's queries, keys and values.
    """
    # Seen in: no transformers model, but FlashAttentionFunction of several repositories
    return any(is_kernel(node) for node in body)


def is_kernel(node: fx.Node) -> bool:
    """Whether a node calls such a function."""
    states = [n for n in node.args if isinstance(n, fx.Node) and len(shape(n)) > 2 and gives_states(n)]
    return node.target in (autograd_function, script_function) and len(states) > 2


def mixes_neighbours(body: set[fx.Node], stream: Stream) -> bool:
    """Whether all mixing is by convolutions and shifts, which a feed-forward part may have, too."""
    # Seen in: ConvNeXt V2, PVT v2
    return all(_is_local(n, stream.layer) for n in body if not stream.holds(n) and mixes_tokens(n, stream.layer))


def _is_local(node: fx.Node, layer: LayerGraph) -> bool:
    module = layer.module(node)
    convolves = layer.op(node) is Op.CONVOLUTION and isinstance(module, (nn.Conv1d, nn.Conv2d, type(None)))
    return convolves or isinstance(module, (_ConstantPadNd, *_POOLS))


def pools(body: set[fx.Node], stream: Stream) -> bool:
    """Whether a pooling of neighbouring tokens takes part: a mixer without weights."""
    # Seen in: PoolFormer
    return any(isinstance(stream.layer.module(n), _POOLS) for n in body if not stream.holds(n))


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or anything else in its `state_dict`, which copies them."""
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def mixes_tokens(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether one operation mixes tokens."""
    if (module := layer.module(node)) is not None:
        if any(isinstance(m, (*_CONVOLUTIONS, *_POOLS)) and _kernel(m) != {1} for m in module.modules()):
            return True
        if isinstance(module, _ConstantPadNd):
            return any(module.padding[2:])  # the first two are of features
        own_code = not type(module).__module__.startswith("torch.") and not has_state(module)
        return own_code and not any(module.children()) and _last_token_reaches_first(module, shape(first_input(node)))
    value, op = example(node), layer.op(node)
    integral = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
    if op is Op.ACCUMULATE and adds_to_neighbours(node, layer):
        return True
    return (not integral and (op in (Op.SCAN, Op.CONVOLUTION) or name_of(node) == "roll")) or is_scores(node)


def adds_to_neighbours(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether a node adds values at places that no hidden state decides, and that are others than
    those from which the values were taken: messages along the edges of a graph.

    A mixture of experts adds at places that its router chose, or from which it took the tokens.
    """
    # Seen in: no transformers model, but graph transformers (`x.index_add(0, target, v[source])`)
    index, added = operand_of(node, 2, "index"), operand_of(node, 3, "source", "src")
    if not isinstance(index, fx.Node) or not isinstance(added, fx.Node):
        return False
    if any(is_weighted(n, layer) for n in upstream(index)):
        return False
    taken = [places for n in upstream(added) if (places := _places_taken(n)) is not None]
    return bool(taken) and any(places not in set(upstream(index)) for places in taken)


def _places_taken(node: fx.Node) -> fx.Node | None:
    """The tensor of places from which a node takes entries; None for a node that takes none."""
    places = node.args[1] if node.target is operator.getitem else operand_of(node, 2, "index")
    if node.target is not operator.getitem and name_of(node) not in ("index_select", "gather"):
        return None
    is_tensor = isinstance(places, fx.Node) and isinstance(example(places), torch.Tensor)
    return places if is_tensor and isinstance(places, fx.Node) else None


def _kernel(module: nn.Module) -> set[int]:
    size: int | tuple[int, ...] = getattr(module, "kernel_size", ())
    return {size} if isinstance(size, int) else set(size)


def _last_token_reaches_first(module: nn.Module, sizes: tuple[int, ...]) -> bool:
    """Whether the result for the first token depends on the last one."""
    # Seen in: FNet, whose mixers would be no sub-layers without it
    if len(sizes) != 3 or sizes[1] < 2 or computes_by_entry(module, sizes):
        return False
    before = torch.ones(sizes).cumsum(-1)
    after = before.clone()
    after[:, -1] += 1
    with torch.no_grad(), contextlib.suppress(Exception):  # it may take more than one tensor
        one, other = (first_tensor(module(x)) for x in (before, after))
        return one is not None and other is not None and not torch.equal(one[1][:, 0], other[1][:, 0])
    return False


def computes_by_entry(module: nn.Module, sizes: tuple[int, ...]) -> bool:
    """Whether PyTorch says of all operations in a module's code that they compute entry by entry.
    No data is read, as of an activation that would take milliseconds over the tokens of an image.
    """
    operations = _Operations()
    x = torch.empty(sizes, device="meta")
    with torch.no_grad(), contextlib.suppress(Exception), operations:  # it may take more than one tensor
        return isinstance(module(x), torch.Tensor) and operations.sizes == {tuple(sizes)}
    return False


class _Operations(TorchDispatchMode):
    """Records the sizes of all results; none of an operation that does not compute by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = set[tuple[int, ...] | None]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sizes.add(tuple(result.shape) if torch.Tag.pointwise in func.tags else None)
        return result


def moves_entries(module: nn.Module, sizes: tuple[int, ...]) -> bool:
    """Whether the result of a module is its input in another order, or shape."""
    if computes_by_entry(module, sizes):
        return False
    numbers = torch.arange(prod(sizes), dtype=torch.float64).view(sizes)
    with torch.no_grad(), contextlib.suppress(Exception):  # it may take more than one tensor
        moved = module(numbers.clone())
        is_order = isinstance(moved, torch.Tensor) and torch.equal(moved.flatten().sort()[0], numbers.flatten())
        return is_order and not torch.equal(moved, numbers)
    return False


def mixes_numbers(body: set[fx.Node], stream: Stream) -> bool:
    """Whether a Linear or a sum of a sub-layer is over tokens of the stream, or one entry is
    computed from several tokens. Tokens are numbered as features are, and what the code does to
    their layout is done to the numbers.
    """
    # Seen in: MLP-Mixer, MobileViT 2, whose mixers would be feed-forward networks without it
    layer, numbers = stream.layer, dict[fx.Node, Any]()
    for node in sorted(body):
        if stream.holds(node):
            numbers |= _numbered(node, stream)
            continue
        if (written := _after_write(node, numbers)) is not None:
            numbers[node] = written
            continue
        sources = [n for n in value_operands(node) if n in numbers]
        if not sources:
            continue
        tokens = numbers[sources[0]]
        if not isinstance(tokens, torch.Tensor) or not layer.is_linear(node):
            if _is_mixture(node, [numbers.get(n) for n in value_operands(node)], layer):
                return True
            whole = [n for n in sources if shape(n) == shape(node)] or sources  # not a factor of each token
            moved = _padded(node, tokens) if name_of(node) == "pad" else move_numbers(node, whole[:1], numbers)
            numbers |= {node: moved} if moved is not None else {}
        elif (left := _without_features(tokens, node, sources[0], layer)) is None:
            return True
        else:
            numbers[node] = left.expand(shape(node))
    return False


def _padded(node: fx.Node, numbers: torch.Tensor) -> torch.Tensor | None:
    """The numbers of tokens with places around them, -1 there; None for places on one side: code
    shifts tokens by them.
    """
    # Seen in: no transformers model, but Swin MLP, whose shifted windows reach over the border
    sizes: Any = operand_of(node, 1, "pad")
    if not isinstance(sizes, list | tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        return None
    if any((before == 0) != (after == 0) for before, after in zip(sizes[::2], sizes[1::2], strict=True)):
        return None
    padded = nn.functional.pad(numbers, [*sizes], value=-1)
    return padded if padded.shape == shape(node) else None


def _numbered(node: fx.Node, stream: Stream) -> dict[fx.Node, Any]:
    """A number for each token of a value of the stream: (batch, tokens, d), or an image; and for
    those that it selects.
    """
    sizes, features = shape(node), _features_dims(node, stream)
    whole = selected(node) or (stream.layer.passes_through(node) if len(sizes) > 4 else None)  # windows of an image
    if whole is not None:
        numbers = _numbered(whole, stream)
        moved = move_numbers(node, [whole], numbers) if numbers else None
        return {} if moved is None else {node: moved}
    if len(sizes) not in (3, 4):
        return {}
    places = [dim for dim in range(1, len(sizes)) if features != {dim}]
    return {node: numbered(sizes, places)}


def _after_write(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> torch.Tensor | None:
    """The numbers in a tensor of which code writes a part, -1 where it has none; None for any other
    operation.
    """
    # Seen in: no transformers model, but recurrences of Griffin's own code
    args: tuple[Any, ...] = node.args
    if node.target is new_version:
        return numbers.get(args[-1])
    if node.target is not operator.setitem or not isinstance(value := numbers.get(args[2]), torch.Tensor):
        return None
    target, key = args[0], fx.map_arg(args[1], lambda n: cast(Any, example(n)))
    before = numbers.get(target)
    after = torch.full(shape(target), -1) if not isinstance(before, torch.Tensor) else before.clone()
    with contextlib.suppress(RuntimeError, TypeError, IndexError):  # a key that is computed
        after[key] = value
        return after
    return None


def _features_dims(node: fx.Node, stream: Stream) -> set[int]:
    """Where the features of a value of the stream are; several where what reads it disagrees."""
    # Seen in: no transformers model, but convolutions whose channels are tokens, without norms
    layer, sizes = stream.layer, shape(node)
    sums = [n for n in layer.graph.nodes if len(sizes) == 3 and layer.op(n) is Op.ADD and shape(n) == sizes]
    dims = dims_of_readers([*stream.values, *sums], layer) if len(sizes) == 3 else set[int]()
    return dims if len(dims) > 1 else {features_dim(node, layer)}  # only a disagreement counts


def _is_mixture(node: fx.Node, values: list[Any], layer: LayerGraph) -> bool:
    """Whether an operation sums over dimensions of tokens, or computes entries from several. A
    value without numbers is None.
    """
    numbers = [v for v in values if isinstance(v, torch.Tensor) and v.ndim]
    op = layer.op(node)
    if op in (Op.SUM, Op.SOFTMAX) and numbers:
        dims = getattr(layer.module(node), "dim", dim_of(node))
        dims = [dims] if isinstance(dims, int) else dims or ()  # one number of all tokens is a scale
        return any(isinstance(d, int) and (_varies(numbers[0], d) or _is_one_place(node, d, layer)) for d in dims)  # pyright: ignore
    if op is Op.CONVOLUTION and numbers and layer.mixes_features(node):  # in groups: no Linear
        return _varies(numbers[0], 1)
    if op is Op.MATMUL and len(values) == 2 and len(numbers) == 1 and not is_einsum(node):
        return _varies(numbers[0], -1 if numbers[0] is values[0] else -2)
    if op not in (Op.ADD, Op.SUB, Op.MUL, Op.BLEND):
        return False
    pairs = [(distinct(a), distinct(b)) for a, b in pairwise(numbers) if _broadcast(a, b)]
    return any(bool(((one != other) & (one >= 0) & (other >= 0)).any()) for one, other in pairs)


def _is_one_place(node: fx.Node, dim: int, layer: LayerGraph) -> bool:
    """Whether a sum over a dimension of one entry is over places of an image, of which the sample
    has one there, and not over features.
    """
    # Seen in: no transformers model, but MobileViT 2 of timm on images of one patch
    source = first_input(node)
    sizes = shape(source)
    if source is None or len(sizes) != 4 or sizes[dim] != 1:
        return False
    return features_dim(source, layer) == 1 and dim % len(sizes) > 1


def _varies(numbers: torch.Tensor, dim: int) -> bool:
    return -numbers.ndim <= dim < numbers.ndim and varies(numbers, dim)


def _broadcast(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the shapes of two tensors are equal but for sizes of 1."""
    sizes = zip(one.shape, other.shape, strict=False)
    return one.ndim == other.ndim and all(a == b or 1 in (a, b) for a, b in sizes)


def _without_features(tokens: torch.Tensor, linear: fx.Node, source: fx.Node, layer: LayerGraph) -> torch.Tensor | None:
    """The numbers of tokens in the result of a Linear; None where it mixes them."""
    product = layer.product(linear)
    if product is None:
        (dim,) = layer.feature_dims(linear).features
        return None if varies(tokens, dim) else tokens.narrow(dim, 0, 1)
    if product.x is not source:
        return tokens.new_zeros(())
    features = product.d_in.features
    if varies(tokens, features):
        return None
    first = tokens
    for dim in features:
        first = first.narrow(dim, 0, 1)
    left = first.permute(*product.d_in.tokens, *features, *_ones(tokens.ndim, product.d_in))
    left = left.flatten(len(product.d_in.tokens))[..., 0]
    for dim in range(len(shape(linear))):
        left = left if dim in product.d_out.tokens else left.unsqueeze(dim)
    return left


def _ones(size: int, dims: FeatureDims) -> list[int]:
    return [dim for dim in range(size) if dim not in (*dims.tokens, *dims.features)]


def carries_stream(h: fx.Node, results: Collection[fx.Node], stream: Stream) -> bool:
    """Whether a value has the stream in it beside `results` and what Linears compute: where these
    are 0, it is not.
    """
    # Seen in: no transformers model, but layers that join stream and attention by no sum
    layer, carriers = stream.layer, set[fx.Node]()

    def ends(node: fx.Node) -> bool:
        return node in results or layer.is_linear(node) or is_weighted(node, layer) or stream.holds(node)

    for node in sorted(upstream(h, ends)):  # in the order in which they run
        operands = [] if ends(node) else list(filter(stream.reaches, value_operands(node)))
        some = all if layer.op(node) is Op.MUL else any
        if stream.holds(node) or (operands and some(n in carriers for n in operands)):
            carriers.add(node)
            carriers.update(n for n in operands if changes(node, n))
    return h in carriers


def alike_summands(total: fx.Node, stream: Stream) -> list[fx.Node]:
    """The values whose sum is `total`, if there are several, each computed by modules of its own
    whose names differ in numbers.
    """
    # Seen in: no transformers model, but ViTs with several branches a layer
    branches = _summands(total, stream)
    bodies = [[n for n in stream.body(branch) if not stream.holds(n)] for branch in branches]
    names = [{str(n.target) for n in body if is_weighted(n, stream.layer)} for body in bodies]
    patterns = [sorted(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in own) for own in names]
    are_apart = sum(map(len, names)) == len(set[str]().union(*names))
    are_alike = len(branches) > 1 and are_apart and all(pattern == patterns[0] != [] for pattern in patterns)
    return branches if are_alike else []


def _summands(total: fx.Node, stream: Stream) -> list[fx.Node]:
    node = stream.layer.stripped(total)
    if stream.layer.op(node) is not Op.ADD or stream.holds(node):
        return [total]
    operands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
    return [value for operand in operands for value in _summands(operand, stream)]
