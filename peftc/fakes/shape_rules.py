"""Shapes, strides and dtypes of the results of common operations on tensors without data.

A rule takes the arguments of an operation and returns the layouts of its results, or None where
it does not apply: where arguments do not fit together, are of several dtypes, or lie in memory in
an order from which that of the result does not follow simply.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]
Layout: TypeAlias = tuple[Shape, Shape, torch.dtype]  # shape, strides, dtype
Rule: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], "tuple[Layout, ...] | None"]

aten = torch.ops.aten
_PRECISE = (torch.float32, torch.float64)  # statistics have the dtype of the values


def contiguous(shape: Sequence[int]) -> Shape:
    """The strides of a tensor in row-major order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The common shape of operands; None if there is none."""
    result: list[int] = []
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        others = {size for size in sizes if size != 1}
        if len(others) > 1:
            return None
        result.append(others.pop() if others else 1)
    return tuple(reversed(result))


def _is_row_major(tensor: Tensor) -> bool:
    """Whether even the strides of dimensions of one say so, which `is_contiguous` ignores."""
    return tensor.stride() == contiguous(tensor.shape)


def _in_order_of(tensor: Tensor) -> Shape | None:
    """The strides of a tensor without gaps in the same order of dimensions; None where that is not
    definite: a dimension of one, or repeated entries, may stand at several places.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if min(shape) < 2 or 0 in strides or len(set(strides)) < len(strides):
        return None
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    dense = dict(zip(order, contiguous([shape[dim] for dim in order]), strict=True))
    return tuple(dense[dim] for dim in range(len(shape)))


def _entrywise(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Layout, ...] | None:
    """The layout of an operation entry by entry. The first operand of full shape sets the order."""
    shape = _broadcast([tuple(t.shape) for t in tensors])
    if dtype is None or shape is None or 0 in shape:
        return None
    if all(_is_row_major(t) for t in tensors):
        return ((shape, contiguous(shape), dtype),)
    strides = _in_order_of(tensors[0]) if tuple(tensors[0].shape) == shape else None
    return None if strides is None else ((shape, strides, dtype),)


def _arithmetic(integers: bool) -> Rule:
    """Sums, products: the dtype of the operands. `integers`: whether it may be one of integers."""

    def rule(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
        tensors = [value for value in args if isinstance(value, Tensor)]
        numbers = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor) and value is not None]
        dtype = _common_dtype(tensors)
        if dtype is None or not all(type(n) in (int, float) for n in numbers):
            return None
        whole = integers and dtype in (torch.int64, torch.int32) and all(type(n) is int for n in numbers)
        return _entrywise(tensors, dtype) if dtype.is_floating_point or whole else None

    return rule


def _common_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    dtypes = {t.dtype for t in tensors}
    return dtypes.pop() if len(dtypes) == 1 else None


def _function(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    """A function of each entry, with any further arguments."""
    x = args[0]
    return _entrywise([x], x.dtype) if x.dtype.is_floating_point else None


def _clamp(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    has_bound = any(value is not None for value in (*args[1:], *kwargs.values()))
    return _function(args, kwargs) if has_bound else None


def _comparison(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    tensors = [value for value in args if isinstance(value, Tensor)]
    dtype = _common_dtype(tensors)
    numbers = all(type(value) in (int, float) for value in args if not isinstance(value, Tensor))
    return None if dtype is None or dtype.is_complex or not numbers else _entrywise(tensors, torch.bool)


def _bitwise(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    is_bool = all(isinstance(value, Tensor) and value.dtype == torch.bool for value in args)
    return _entrywise(args, torch.bool) if is_bool else None


def _where(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    condition, *branches = args
    return _entrywise(args, _common_dtype(branches)) if condition.dtype == torch.bool else None


def _reduction(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    x: Tensor = args[0]
    dims: Sequence[int] = (args[1] if len(args) > 1 else None) or range(x.ndim)
    keepdim = len(args) > 2 and args[2]
    if not x.dtype.is_floating_point or not x.is_contiguous() or kwargs.get("dtype") is not None or 0 in x.shape:
        return None
    reduced = {dim % x.ndim for dim in dims if -x.ndim <= dim < x.ndim}
    if len(reduced) < len(dims):
        return None
    sizes = [1 if d in reduced else n for d, n in enumerate(x.shape) if keepdim or d not in reduced]
    return ((tuple(sizes), contiguous(sizes), x.dtype),)


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    a, b = args
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or _common_dtype(args) is None:
        return None
    shape = (a.shape[0], b.shape[1])
    return ((shape, contiguous(shape), a.dtype),)


def _linear(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    bias, a, b = args[:3]
    layouts = _product((a, b), {})
    if len(args) > 3 or kwargs or layouts is None or bias.dtype != a.dtype:
        return None
    return layouts if bias.ndim <= 2 and _broadcast([tuple(bias.shape), layouts[0][0]]) == layouts[0][0] else None


def _layer_norm(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    x, normalized, *_ = args
    dtype = _common_dtype([value for value in args if isinstance(value, Tensor)])
    fits = tuple(x.shape[x.ndim - len(normalized) :]) == tuple(normalized)
    if dtype not in _PRECISE or not fits or not x.is_contiguous() or 0 in x.shape:
        return None
    if any(isinstance(value, Tensor) and tuple(value.shape) != tuple(normalized) for value in args[2:4]):
        return None
    shape, means = tuple(x.shape), (*x.shape[: x.ndim - len(normalized)], *(1 for _ in normalized))
    return (shape, contiguous(shape), dtype), (means, contiguous(means), dtype), (means, contiguous(means), dtype)


def _cat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Layout, ...] | None:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    # An empty tensor of one dimension fits all others. Seen in: transformers, for an empty cache
    dtype, tensors = _common_dtype(args[0]), [t for t in args[0] if tuple(t.shape) != (0,)]
    if not tensors:
        return None
    first = tensors[0]
    # not channels last
    rows = all(_is_row_major(t) or (t.stride()[-1] == 1 and min(t.shape[1:], default=0) > 1) for t in tensors)
    if dtype is None or not rows or any(t.ndim != first.ndim or 0 in t.shape for t in tensors):
        return None
    if not -first.ndim <= dim < first.ndim:
        return None
    dim %= first.ndim
    if len({(*t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}) > 1:
        return None
    shape = (*first.shape[:dim], sum(t.shape[dim] for t in tensors), *first.shape[dim + 1 :])
    return ((shape, contiguous(shape), dtype),)


def _overloads(names: str, *overloads: str) -> list[Any]:
    packets = [getattr(aten, name) for name in names.split()]
    return [getattr(packet, overload) for packet in packets for overload in overloads if overload in packet.overloads()]


RULES: dict[Any, Rule] = {
    **dict.fromkeys(_overloads("add sub mul", "Tensor", "Scalar"), _arithmetic(True)),
    **dict.fromkeys(_overloads("minimum maximum abs neg floor_divide", "default"), _arithmetic(True)),
    **dict.fromkeys(_overloads("div", "Tensor"), _arithmetic(False)),
    aten.pow.Tensor_Scalar: _arithmetic(False),
    **dict.fromkeys(
        _overloads(
            "exp log sqrt rsqrt sin cos tanh sigmoid erf reciprocal relu gelu silu softplus"
            " leaky_relu elu hardtanh hardswish hardsigmoid mish clamp_min clamp_max",
            "default",
        ),
        _function,
    ),
    aten.clamp.default: _clamp,
    **dict.fromkeys(_overloads("eq ne lt le gt ge", "Tensor", "Scalar"), _comparison),
    **dict.fromkeys(_overloads("bitwise_and bitwise_or", "Tensor"), _bitwise),
    aten.where.self: _where,
    aten.mean.dim: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.mm.default: _product,
    aten.addmm.default: _linear,
    aten.native_layer_norm.default: _layer_norm,
    aten.cat.default: _cat,
}


def _always(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return True


def _by_integers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an index selects by numbers: how many a mask selects depends on its data."""
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


# Operations whose kernels for tensors without data are all that PyTorch's mode would run, with the
# condition for it. Views are among them: their results have the memory of their arguments.
META_KERNELS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    **dict.fromkeys(
        _overloads(
            "view _unsafe_view t transpose permute unsqueeze squeeze expand slice select split_with_sizes"
            " unbind detach alias clone _to_copy empty_like ones_like zeros_like full_like new_empty new_ones"
            " new_zeros bmm embedding topk cumsum _softmax _scaled_dot_product_flash_attention_for_cpu",
            "default",
            "int",
            "dim",
            "dims",
            "Tensor",
        ),
        _always,
    ),
    aten.split.Tensor: _always,
    aten.sort.default: _always,
    aten._grouped_mm.default: _always,
    aten.index.Tensor: _by_integers,
}
NEW_TENSORS = frozenset(
    _overloads("arange ones zeros full empty scalar_tensor", "default", "start", "start_step", "memory_format")
)
# Operations that write to their first argument, where the result of the rule has its layout.
IN_PLACE: dict[Any, Rule] = {
    **dict.fromkeys(_overloads("add_ sub_ mul_", "Tensor", "Scalar"), _arithmetic(True)),
    **dict.fromkeys(_overloads("div_", "Tensor"), _arithmetic(False)),
}
