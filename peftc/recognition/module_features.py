"""Which dimension of what a module reads and returns has its features, how many there are, and how
its matrix is stored.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd  # pyright: ignore[reportPrivateUsage]
from transformers.pytorch_utils import Conv1D

from peftc.addressing.sites import INPUT, OUTPUT, TABLE_IDS, ActivationRef, Kernel, MatrixLayout, State, WeightRef
from peftc.dataflow.feature_axis import CHANNELS_FIRST
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, parts, shape
from peftc.forms.shapes import Tokens, Vector, Weight
from peftc.modules.torch_attributes import ATTRIBUTES
from peftc.observation.sample_forward import ModuleCall
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.region_trace import ModuleCall as TracedCall
from peftc.tracing.tracer import approximate_trace

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Features:
    """`size`: None where unknown. `is_map`: they are the second dimension. `kernel`: of patches.
    `ids`: of an embedding, where the ids are; `size` is how many. `unknown`: why there is no size.
    """

    size: int | None = None
    is_map: bool = False
    kernel: Kernel | None = None
    ids: str = ""
    unknown: str = ""


def module_features(module: nn.Module, call: ModuleCall, multiplies: bool = False) -> tuple[Features, Features]:
    """The features of a module's input and of its output, the same in all calls of a forward.
    `multiplies`: whether a call multiplies by the module's weight.
    """
    if isinstance(module, _ConvNd):
        rank, channels = len(module.kernel_size) + 2, module.out_channels
        if len(call.input_shape) != rank or call.output_shape[1:2] != (channels,):
            missing = Features(unknown="it reads no batch of images, or has a forward of its own")
            return missing, missing
        return _patch(module), Features(channels, is_map=True)
    if isinstance(module, CHANNELS_FIRST):
        x, h = (_channels(shape) for shape in (call.input_shape, call.output_shape))
        return x, h
    has_own = _reads_last_dimension(module, call)
    x, h = (_last(shape, call, has_own) for shape in (call.input_shape, call.output_shape))
    return (_ids(module, multiplies) if isinstance(module, nn.Embedding) else x), h


def depends_on_numbers(module: nn.Module) -> bool:
    """Whether `module_features` and `stores_transposed` may differ between modules whose classes,
    shapes of parameters, options and calls are equal.
    """
    if isinstance(module, (_ConvNd, nn.Embedding)):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, FakeTensor) and weight.ndim == 2 and not type(module).__module__.startswith("torch.")


def stores_transposed(module: nn.Module, known: dict[object, bool] | None = None) -> bool:
    """Whether a module of one matrix stores it (in, out): of a class of the model's own, its code
    tells. `known`: the answers for modules of the model that are equal but for values of tensors.
    """
    # Seen in: GPT-2, whose Conv1D other repositories copy
    weight = getattr(module, "weight", None)
    if isinstance(module, Conv1D) or not isinstance(weight, FakeTensor) or weight.ndim != 2:
        return isinstance(module, Conv1D)
    if isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__module__.startswith("torch."):
        return False
    answers, key = {} if known is None else known, _contents(module)
    if key not in answers:
        widths = dict.fromkeys(reversed(weight.shape))
        products = filter(None, (_transposed_products(module, weight, d_in) for d_in in widths))
        answers[key] = any(next(products, ()))
    return answers[key]


def _contents(module: nn.Module) -> object:
    """Equal for two modules of a model whose code, tensors' shapes and other contents are equal."""
    contents: list[object] = [type(module)]
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            contents += [(key, None if t is None else (t.shape, t.dtype)) for key, t in value.items()]
        elif isinstance(value, _PLAIN):
            contents.append((name, type(value), value))
        elif name not in ATTRIBUTES or value:  # such as a configuration, or children: the same object
            contents.append((name, id(value)))
    return tuple(contents)


def _transposed_products(module: nn.Module, weight: FakeTensor, d_in: int) -> list[bool]:
    """For each product of `d_in` features with a weight, whether it is with (in, out); none where
    the code takes no such input.
    """
    _, *names = forward_signature(module).parameters
    for sizes in ((1, 1), (1,), (1, 1, 1)):  # tokens, rows of tokens, an image
        try:
            with weight.fake_mode:
                graph = approximate_trace(module, dict.fromkeys(names[:1], weight.new_empty(*sizes, d_in))).graph
        except Exception:  # of a model's own code
            continue
        products = filter(None, map(LayerGraph(graph, module).product, graph.nodes))
        layouts = [product.weight.layout for product in products if product.weight.parameter == "weight"]
        return [layout is not None and layout.is_transposed for layout in layouts]
    return []


def _ids(module: nn.Embedding, multiplies: bool) -> Features:
    """The ids that an embedding reads: its input, or what a forward of its own passes on.

    With `max_norm` it changes its weight while it reads: no equation says so.
    """
    if multiplies:
        # Seen in: Ovis 2, which also gives a table probabilities in the place of ids
        return Features(unknown="a call multiplies by the table, in the place of reading its rows by ids")
    forward = inspect.unwrap(type(module).forward)
    names = {*forward.__code__.co_names} if hasattr(forward, "__code__") else set[str]()
    if module.max_norm is not None or not ("embedding" in names or names >= {"super", "forward"}):
        # Seen in: Whisper, whose positions are a slice of the table
        return Features(unknown="its code takes rows of the table without ids, or changes them as it reads")
    return Features(module.num_embeddings, ids=INPUT if forward is nn.Embedding.forward else TABLE_IDS)


def _channels(shape: tuple[int, ...]) -> Features:
    return Features(shape[1], is_map=len(shape) > 2) if len(shape) > 1 else Features()


def _last(shape: tuple[int, ...], call: ModuleCall, has_own: bool) -> Features:
    """The last dimension: that of tokens, of any rank where the module's own weight says so."""
    if not shape:
        return Features(unknown="a forward calls it without a tensor" if call.count else "")
    if not has_own and call.varies:
        return Features(unknown="its calls differ in the rank or the features of what it reads or returns")
    if not has_own and len(shape) not in (2, 3):
        return Features(unknown=f"which dimension of {list(shape)} has its features is not known")
    return Features(shape[-1])


def _reads_last_dimension(module: nn.Module, call: ModuleCall) -> bool:
    """Whether a module's own weight has the sizes of the last dimensions of input and output."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or not call.input_shape or not call.output_shape:
        return False
    ends = (call.input_shape[-1], call.output_shape[-1])
    if isinstance(module, nn.Embedding):
        return ends[1] == module.embedding_dim
    sizes = tuple(weight.shape) * (1 if weight.ndim == 2 else 2)
    return len(sizes) == 2 and ends in (sizes, sizes[::-1])


def reads_patches(module: nn.Module | None) -> bool:
    """Whether a module is a convolution that multiplies patches of positions by a matrix."""
    return isinstance(module, _ConvNd) and _patch(module).kernel is not None


def patch_states(name: str, module: nn.Module, x: tuple[int, ...], h: tuple[int, ...]) -> dict[str, State]:
    """The states of a convolution that multiplies patches by a matrix. `x`, `h`: sizes of what it
    reads and returns.
    """
    before, after = module_features(module, ModuleCall(input_shape=x, output_shape=h))
    if before.size is None or after.size is None:
        return {}
    layout = MatrixLayout(tuple(range(len(x))), 1)
    shapes_and_places = {
        "w": (Weight(after.size, before.size), WeightRef(name, "weight", layout=layout), None),
        "b": (Vector(after.size), WeightRef(name, "bias"), None),
        "x": (Tokens(before.size), None, ActivationRef(INPUT, feature_map=True, kernel=before.kernel)),
        "h": (Tokens(after.size), None, ActivationRef(OUTPUT, feature_map=True)),
    }
    return {
        name: State(name, shape, weight=weight, activation=place)
        for name, (shape, weight, place) in shapes_and_places.items()
        if weight is None or isinstance(getattr(module, weight.attribute), nn.Parameter)
    }


def _patch(module: _ConvNd) -> Features:
    """What a convolution reads for one position. One in groups reads other channels for each group,
    and a transposed one has no such patch; nor is it known for a class with a forward of its own.
    """
    if module.groups != 1:
        return Features(unknown=f"its kernel reads other channels for each of its {module.groups} groups")
    if isinstance(module, _ConvTransposeNd) or _has_own_forward(module):
        return Features(unknown="it is no plain convolution: what its kernel reads is not known")
    size, padding = module.kernel_size, _padding(module)
    features = module.in_channels * prod(size)
    if {*size, *module.stride} == {1} and not any(chain(*padding)):
        return Features(features, is_map=True)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return Features(features, is_map=True, kernel=Kernel(size, module.stride, module.dilation, padding, mode))


def boundary_states(
    states: Mapping[str, State], values: Mapping[str, fx.Node | None], calls: Sequence[TracedCall]
) -> dict[str, State]:
    """The states of a module with its argument as `x` and its result as `h`, those of each call.

    Args: `values`: the nodes of both in one of the `calls` of the layer's graph.
    """
    # Seen in: DeBERTa (keys of tokens and of positions), CogView 4, Perceiver AR
    result = dict(states)
    for name, boundary in (("x", INPUT), ("h", OUTPUT)):
        place = states[name].activation if name in states else None
        if place is not None:
            nested = [call.arguments if name == "x" else call.result for call in calls]
            tensors = [(path, part) for value in nested for path, part in parts(value) if is_tensor(part)]
            paths = [path for path, part in tensors if part is values[name]]  # empty if it is a parameter
            path = next(iter((*paths, *(path for path, _ in tensors))), ())
            result[name] = replace(states[name], activation=replace(place, node=boundary, key_path=path))
    return result


def reads_examples(calls: Iterable[fx.Node]) -> bool:
    """Whether all calls read values of shape (examples, …, d), of one batch or with one example."""
    shapes = [shape(operand) for call in calls for operand in call.all_input_nodes if is_tensor(operand)]
    return len({sizes[0] for sizes in shapes if sizes} - {1}) < 2 and all(len(sizes) > 2 for sizes in shapes)


def _has_own_forward(module: _ConvNd) -> bool:
    stock = next((c for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(module, c)), _ConvNd)
    return any(getattr(type(module), name) is not getattr(stock, name, None) for name in ("forward", "_conv_forward"))


def _padding(module: _ConvNd) -> tuple[tuple[int, int], ...]:
    """Entries before and after each dimension. Source: `nn.modules.conv._ConvNd.__init__`."""
    size, dilation = module.kernel_size, module.dilation
    if module.padding == "same":
        totals = [gap * (length - 1) for gap, length in zip(dilation, size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if isinstance(module.padding, str):  # "valid"
        return ((0, 0),) * len(size)
    return tuple((int(entries), int(entries)) for entries in module.padding)
