"""Parameters in generated forwards: quantised, sliced, stacked, or replaced for one call."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from peftc.equation_code.functions import add_to, cast_like, upcast
from peftc.modules.packed import packed_shape, unpacked_weight

Rows = tuple[int, int, int, int, int]
"""(base, count, stride, start, stop): rows [start, stop) of `count` blocks of `stride` rows."""


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether a tensor class that can dequantise stores the parameter (torchao)."""
    return type(weight).dequantize is not torch.Tensor.dequantize


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The parameter's values as an ordinary tensor."""
    return weight.dequantize() if is_quantised(weight) else weight


def dense_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """The values of a module's own parameter as an ordinary tensor. Raises: P437."""
    is_packed = name == "weight" and packed_shape(module) is not None
    return unpacked_weight(module) if is_packed else dense(getattr(module, name).detach())


def full_precision(weight: torch.Tensor) -> torch.Tensor:
    """A parameter to compute with: half precision becomes float32, to keep small changes."""
    return upcast(dense(weight))


def stored_as(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A new value of a parameter, rounded once to the parameter's dtype."""
    return value.to(weight.dtype)


def scaled_product(x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, *products: Any) -> torch.Tensor:
    """x Wᵀ for the edited weight W = rows ⊙ (weight + Σ factor · left right), without forming W.

    In half precision, and of a quantised weight, W is formed, and rounded once.

    Args:
        products: factor, left and right of each product.

    Shapes:
        x: (…, d_in)
        weight: (d_out, d_in)
        rows: (d_out, 1)
        left, right: (d_out, r), (r, d_in)
        result: (…, d_out)
    """
    parts = [products[i : i + 3] for i in range(0, len(products), 3)]
    dtypes = {rows.dtype, *(part.dtype for product in parts for part in product[1:])}
    if dtypes != {weight.dtype} or weight.dtype in (torch.float16, torch.bfloat16) or is_quantised(weight):
        edited = full_precision(weight)
        for factor, left, right in parts:
            edited = add_to(edited, torch.matmul(left, right), factor)
        edited = cast_like(rows * cast_like(edited, rows), edited)
        return F.linear(x, stored_as(edited, weight))
    result = F.linear(x, weight)
    for factor, left, right in parts:
        result = add_to(result, F.linear(F.linear(x, right), left), factor)
    return result * cast_like(rows.squeeze(-1), result)


def as_matrix(stored: torch.Tensor, order: tuple[int, ...], rows: int) -> torch.Tensor:
    """A parameter of any shape as (out, in), or as (out,): its dimensions in this order, of which
    the first `rows` are (out).
    """
    matrix = stored.permute(order).flatten(0, rows - 1)
    return matrix.flatten(1) if rows < len(order) else matrix


def as_stored(matrix: torch.Tensor, stored: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A new value (out, in) in the shape of the parameter."""
    whole = matrix.reshape([stored.shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(len(order))])


def rows_of(whole: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int) -> torch.Tensor:
    """The interleaved `Rows` of a tensor along `dim` (0 or -1)."""
    return blocks_of(whole, dim, base, count, stride, start, stop).flatten(0 if dim == 0 else -2, 1 if dim == 0 else -1)


def blocks_of(whole: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int) -> torch.Tensor:
    """A view of interleaved `Rows`, with (count, stop - start) in place of `dim`."""
    blocks = whole.narrow(dim, base, count * stride).unflatten(dim, (count, stride))
    return blocks[:, start:stop] if dim == 0 else blocks[..., start:stop]


def with_rows(
    whole: torch.Tensor, new: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int
) -> torch.Tensor:
    """A copy of `whole` with interleaved `Rows` replaced by `new`."""
    result = whole.to(torch.promote_types(whole.dtype, new.dtype), copy=True)
    blocks_of(result, dim, base, count, stride, start, stop).copy_(new.unflatten(dim, (count, stop - start)))
    return result


def stacked_slice(whole: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """A view of one of `count` matrices stacked along the first dimension."""
    return stacked_slices(whole, count)[index]


def stacked_slices(whole: torch.Tensor, count: int) -> torch.Tensor:
    """All stacked matrices. Shapes: (count, …) stays, (count · n, d) becomes (count, n, d)."""
    return whole if whole.shape[0] == count else whole.unflatten(0, (count, -1))


def with_stacked_slices(
    whole: torch.Tensor, count: int, transposed: bool, slices: list[tuple[int, Rows | None]], values: list[torch.Tensor]
) -> torch.Tensor:
    """A copy of `whole` with new values of some stacked matrices, or of some rows of them.

    `transposed`: they are stored (in, out). `slices`: (index, rows or None for all).
    Shapes: values (rows, in), or (rows,).
    """
    matrices = [matrix.t() if transposed else matrix for matrix in stacked_slices(whole, count).unbind(0)]
    for (index, rows), value in zip(slices, values, strict=True):
        new = stored_as(value, whole)
        matrices[index] = new if rows is None else with_rows(matrices[index], new, 0, *rows)
    return torch.stack([matrix.t() if transposed else matrix for matrix in matrices]).view(whole.shape)


class ModuleView:
    """A module in which some parameters have other values; all else is that of the module."""

    def __init__(self, module: Any, values: dict[str, Any]) -> None:
        vars(self)["_module"] = module
        for name, value in values.items():
            vars(self)[name] = ModuleView(getattr(module, name), value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_module"](*args, **kwargs)
