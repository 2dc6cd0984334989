"""The operations of a traced graph, in one vocabulary.

Models spell one operation in many ways: `a + b`, `a.add(b)`, `torch.add(a, b)` and `a += b` are all
`Op.ADD`. Recognisers read `Op` only; the names that PyTorch gives to operations stand in this file
and nowhere else.
"""

import operator
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from peftc.dataflow.nodes import example
from peftc.tracing.in_place import AUGMENTED, EFFECT, WRITES
from peftc.tracing.operations import attention, autograd_function, model_function, new_version, segment


class Op(Enum):
    """What a node computes."""

    __hash__ = object.__hash__  # by identity: sets of operations are asked often, and Enum's hash is slow

    # the ends of a graph
    INPUT = auto()
    PARAMETER = auto()  # a tensor that a module holds
    OUTPUT = auto()

    # element by element
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    MASK = auto()  # other values for some entries
    CLAMP = auto()
    DROPOUT = auto()
    CAST = auto()  # another dtype, device or memory format, or a copy
    ACTIVATION = auto()
    BLEND = auto()  # of three tensors
    ACCUMULATE = auto()  # terms are added at some entries

    # over a dimension
    MATMUL = auto()
    LINEAR = auto()
    CONVOLUTION = auto()
    NORM = auto()
    SOFTMAX = auto()
    ATTENTION = auto()
    SUM = auto()
    SCAN = auto()  # each entry depends on those before it, or on all
    CHOICE = auto()  # entries, or their indices, by the order of their values

    # entries move and keep their values
    RESHAPE = auto()
    PERMUTE = auto()
    EXPAND = auto()
    SPLIT = auto()
    SELECT = auto()
    ROLL = auto()
    JOIN = auto()

    # the rest
    CREATE = auto()  # a tensor of constants
    BROADCAST = auto()  # several tensors, each to the shape of all
    WRITE = auto()  # into a part of a tensor, in place
    QUERY = auto()  # a size, a dtype, a device: nothing that depends on values
    ITEM = auto()  # one of several results
    CACHE = auto()  # keys and values join those of earlier tokens
    MODULE = auto()  # a leaf without one of the meanings above
    OTHER = auto()


LAYOUT = frozenset({Op.RESHAPE, Op.PERMUTE, Op.EXPAND, Op.SPLIT, Op.SELECT, Op.ROLL})
BY_ENTRY = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MASK, Op.CLAMP, Op.DROPOUT, Op.CAST})
SCALE = frozenset({Op.MUL, Op.DIV})
# other operands tell a dtype, a device or a shape
OF_FIRST = frozenset({Op.CAST, Op.RESHAPE, Op.EXPAND})

# By the name of a method, a function or an attribute, without the `_` of in-place variants.
_NAMES = {
    Op.ADD: "add iadd",
    Op.SUB: "sub isub subtract rsub",
    Op.MUL: "mul imul multiply",
    Op.DIV: "div truediv itruediv divide",
    Op.MASK: "where masked_fill maximum",
    Op.CLAMP: "clamp clip",
    Op.DROPOUT: "dropout",
    Op.CAST: "to type type_as float half bfloat16 double contiguous clone",
    Op.ACTIVATION: "tanh",
    Op.BLEND: "lerp addcmul addcdiv",
    Op.ACCUMULATE: "index_add scatter_add",
    Op.MATMUL: "matmul bmm mm mv baddbmm addmm linalg_matmul einsum tensordot inner",
    Op.LINEAR: "linear",
    Op.CONVOLUTION: "conv1d conv2d",
    Op.NORM: "layer_norm rms_norm group_norm batch_norm instance_norm normalize",
    Op.SOFTMAX: "softmax",
    Op.ATTENTION: "scaled_dot_product_attention",
    Op.SUM: "sum mean var std norm linalg_norm linalg_vector_norm",
    Op.SCAN: "cumsum cumprod logcumsumexp rfft irfft fft fft2 fftn unfold grid_sample",
    Op.CHOICE: "topk sort argsort argmax max one_hot scatter",
    Op.RESHAPE: "view view_as reshape reshape_as flatten unflatten squeeze unsqueeze",
    Op.PERMUTE: "transpose permute movedim moveaxis swapaxes swapdims t T mT H mH adjoint",
    Op.EXPAND: "expand expand_as broadcast_to repeat repeat_interleave tile",
    Op.SPLIT: "split split_with_sizes tensor_split unsafe_split chunk unsafe_chunk unbind",
    Op.SELECT: "narrow select index_select gather take_along_dim",
    Op.ROLL: "roll flip",
    Op.JOIN: "cat concat stack",
    Op.CREATE: "empty zeros ones rand randn randint randperm eye full empty_like zeros_like ones_like"
    " rand_like randn_like randint_like full_like new_empty new_zeros new_ones new_full new_tensor"
    " empty_strided new_empty_strided",
    Op.BROADCAST: "broadcast_tensors meshgrid atleast_1d atleast_2d atleast_3d",
    Op.WRITE: "setitem copy fill zero set normal uniform",
    Op.QUERY: "size dim ndimension numel nelement stride storage_offset element_size itemsize"
    " get_device is_floating_point is_complex is_contiguous",
    Op.CACHE: "update",
}
_BY_KIND = {"placeholder": Op.INPUT, "get_attr": Op.PARAMETER, "call_module": Op.MODULE, "output": Op.OUTPUT}
_BY_NAME = {name: op for op, names in _NAMES.items() for name in names.split()}
_BY_FUNCTION: dict[object, Op] = {attention: Op.ATTENTION, segment: Op.SELECT, new_version: Op.WRITE}
_BY_CLASS = {
    (nn.Dropout, nn.Identity): Op.DROPOUT,
    (nn.Softmax,): Op.SOFTMAX,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): Op.CONVOLUTION,
}
_FACTS = (torch.device, torch.dtype, torch.layout, torch.Size, int)


def name_of(node: fx.Node) -> str:
    """What PyTorch calls an operation: `add` for `a + b` and `a.add_(b)`, `T` for `x.T`."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return _plain_name(str(node.args[1]) if node.target is getattr else node.target)


@cache
def _plain_name(target: object) -> str:
    name = str(getattr(target, "__name__", target)).removeprefix("fft_")
    return name if name.endswith("__") else name.removesuffix("_")


def op_named(name: str) -> Op:
    """The operation of a function or method of PyTorch."""
    return _BY_NAME.get(name.removesuffix("_"), Op.OTHER)


def op_of(node: fx.Node) -> Op:
    """The operation of any node but the call of a module, of which `LayerGraph.op` knows more."""
    op = _op_of_target(node.op, node.target)
    return _op_of_operands(node) if op is None else op


@cache
def _op_of_target(kind: str, target: object) -> Op | None:
    """The operation of all calls of a target; None where it depends on the operands."""
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    if kind == "call_function" and target in _BY_FUNCTION:
        return _BY_FUNCTION[target]
    if target in (autograd_function, operator.getitem, getattr):
        return None
    op = _BY_NAME.get(_plain_name(target), Op.OTHER)
    return None if op is Op.CHOICE and _plain_name(target) == "max" else op


def _op_of_operands(node: fx.Node) -> Op:
    # an autograd function of the model's own has nothing but its name
    if node.target is autograd_function:
        return Op.SOFTMAX if "softmax" in getattr(node.kwargs["function"], "__name__", "").lower() else Op.OTHER
    if node.target is operator.getitem:
        source = example(node.args[0])
        if isinstance(source, torch.Tensor) and _adds_dimensions(node.args[1]):
            return Op.RESHAPE
        return Op.SELECT if isinstance(source, torch.Tensor) or isinstance(node.args[1], slice) else Op.ITEM
    if node.target is getattr:
        return Op.QUERY if isinstance(example(node), _FACTS) else _BY_NAME.get(name_of(node), Op.OTHER)
    # the maximum of one tensor is a choice, that of several a mask
    return Op.MASK if isinstance(example(node), torch.Tensor) and len(node.all_input_nodes) > 1 else Op.CHOICE


def _adds_dimensions(key: Any) -> bool:
    """Whether a key is that of an `unsqueeze`: `x[None, :]`."""
    # Seen in: no transformers model, but the temporal blocks of Stable Video Diffusion
    keys = key if isinstance(key, tuple) else (key,)
    return any(k is None for k in keys) and not any(
        isinstance(k, fx.Node) or k not in (None, ..., slice(None)) for k in keys
    )


def rerun(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a function or method computes from other arguments."""
    name = name_of(node)
    if name.endswith("_as"):  # the shape of another tensor: `expand_as`
        return getattr(args[0], name.removesuffix("_as"))(tuple(example(node).shape))  # pyright: ignore
    if node.target is getattr or node.op == "call_method":
        target = args[1] if node.target is getattr else node.target
        member = getattr(args[0], str(target))
        return member if node.target is getattr else member(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def dim_of(node: fx.Node, default: Any = None) -> Any:
    """The `dim` of an operation over dimensions; `default` where it has none."""
    position = 2 if name_of(node) in ("norm", "linalg_norm", "linalg_vector_norm") else 1  # behind the order
    return node.kwargs.get("dim", node.args[position] if len(node.args) > position else default)


def selects_along(node: fx.Node) -> bool:
    """Whether a node is all entries at some indices of one dimension."""
    return name_of(node) in ("narrow", "select", "index_select")


def is_size(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "size"


def is_zeros(node: fx.Node) -> bool:
    """Whether a node creates a tensor of zeros."""
    return op_of(node) is Op.CREATE and name_of(node) in ("zeros", "zeros_like", "new_zeros")


def is_in_place(node: fx.Node) -> bool:
    """Whether the spelling of an operation says that it writes into its first operand."""
    return node.op in ("call_function", "call_method") and _writes_first(node.target)


@cache
def _writes_first(target: object) -> bool:
    name = str(getattr(target, "__name__", target))
    if name in ("setitem", "setattr") or target in AUGMENTED:
        return True
    is_operator = getattr(operator, name, None) is target  # `and_`, `or_`: the underscore is for Python's words
    return name.endswith("_") and not name.endswith("__") and not is_operator


def has_side_effects(node: fx.Node) -> bool:
    """Whether running a node twice could change something, or costs a module's forward."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    if (
        WRITES in node.meta
        or EFFECT in node.meta
        or is_in_place(node)
        or node.target in (attention, model_function, segment)
    ):
        return True
    return op_of(node) in (Op.DROPOUT, Op.CACHE) or name_of(node) in ("append", "pop", "setdefault", "_assert")


def module_op(module: nn.Module) -> Op:
    """The operation of a leaf module."""
    other = Op.NORM if is_norm_module(module) else Op.MODULE
    return next((op for classes, op in _BY_CLASS.items() if isinstance(module, classes)), other)


# A Linear with one output has one row of weights, as a norm has.
_PRODUCTS = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)  # pyright: ignore[reportPrivateUsage]


def is_norm_module(module: nn.Module) -> bool:
    """Whether the only parameters of a module scale and shift features: layer norms, RMS norms."""
    if next(module.children(), None) is not None or isinstance(module, _PRODUCTS):
        return False
    weights = [sum(size > 1 for size in p.shape) for p in module.parameters()]
    return max(weights) == 1 if weights else is_norm_by_name(module)


def is_norm_by_name(module: nn.Module) -> bool:
    """A norm without a weight has nothing but its name."""
    return "norm" in type(module).__name__.lower()
