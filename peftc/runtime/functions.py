"""What generated forwards call. Everything here runs inside user models: plain functions of tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.patches import attention

__all__ = [
    "Reading",
    "as_image",
    "attention",
    "attention_with_rows",
    "full_precision",
    "function_with_rows",
    "like_operand",
    "recheck_guard",
    "replaced",
    "reshaped_like",
    "respecialize",
    "rows_of",
    "stacked_slice",
    "stored_as",
    "tokens_of",
    "unflattened",
    "with_rows",
    "with_stacked_slices",
    "with_visible",
]


def replaced(result: Any, path: tuple[Any, ...], value: Any) -> Any:
    """`result` with the part at `path` replaced; tuples, lists and dictionaries are copied, not changed."""
    if not path:
        return value
    parts = copy.copy(result) if isinstance(result, dict) else list(result)
    parts[path[0]] = replaced(parts[path[0]], path[1:], value)
    make: Any = getattr(type(result), "_make", tuple)  # of a named tuple
    return make(parts) if isinstance(result, tuple) else parts


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether a parameter is stored in few bits, by a tensor class that says how to undo it (torchao)."""
    return type(weight).dequantize is not torch.Tensor.dequantize


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The values of a parameter, where it is quantised as others are."""
    return weight.dequantize() if is_quantised(weight) else weight


def full_precision(weight: torch.Tensor) -> torch.Tensor:
    """A parameter to compute with: float32 where it is stored in half precision, so that small changes are not lost."""
    weight = dense(weight)
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight


def stored_as(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The new value of a parameter, rounded once to the dtype it is stored in."""
    return value.to(weight.dtype)


def unflattened(value: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """(batch · tokens, d) as (batch, tokens, d), batch and tokens being those of the layer's input."""
    return value.view(*stream.shape[:-1], value.shape[-1])


def tokens_of(image: torch.Tensor, second: bool) -> torch.Tensor:
    """An image as tokens (batch, height · width, d). Shapes: image (batch, d, height, width) where `second`, else (batch, height,
    width, d).
    """
    return image.flatten(2).transpose(1, 2) if second else image.flatten(1, -2)


def as_image(tokens: torch.Tensor, image: torch.Tensor, second: bool) -> torch.Tensor:
    """Tokens as an image, laid out as `image` is."""
    return (tokens.transpose(1, 2) if second else tokens).reshape(image.shape)


def rows_of(whole: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int) -> torch.Tensor:
    """Interleaved rows: [start, stop) of each of `count` pieces of `stride` rows, which begin at `base`, along `dim` (0 or -1)."""
    return blocks_of(whole, dim, base, count, stride, start, stop).flatten(0 if dim == 0 else -2, 1 if dim == 0 else -1)


def blocks_of(whole: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int) -> torch.Tensor:
    """A view of the same, (count, stop - start) in the place of `dim`."""
    pieces = whole.narrow(dim, base, count * stride).unflatten(dim, (count, stride))
    return pieces[:, start:stop] if dim == 0 else pieces[..., start:stop]


def with_rows(
    whole: torch.Tensor, new: torch.Tensor, dim: int, base: int, count: int, stride: int, start: int, stop: int
) -> torch.Tensor:
    """`whole` with such rows replaced by `new`."""
    result = whole.to(torch.promote_types(whole.dtype, new.dtype), copy=True)
    blocks_of(result, dim, base, count, stride, start, stop).copy_(new.unflatten(dim, (count, stop - start)))
    return result


def like_operand(rows: torch.Tensor, operand: torch.Tensor, order: tuple[int, ...], merged: bool) -> torch.Tensor:
    """Rows (batch, heads, rows, d) laid out as an operand of a product: its dimensions are `order` of those, the fifth one of
    blocks of tokens; with batch and heads in one dimension where `merged`.
    """
    rows = rows.to(operand.dtype)
    rows = rows.unsqueeze(-1) if len(order) == 5 else rows  # the same for each block
    return (rows.flatten(0, 1) if merged else rows).permute(order)


def reshaped_like(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Scores of joined rows in the shape of the others."""
    return rows.reshape(*others.shape[:-1], rows.shape[-1])


def with_visible(mask: torch.Tensor, rows: torch.Tensor, shown: float, after: bool) -> torch.Tensor:
    """A mask of keys with `shown` for the keys of joined rows, behind the others where `after`, else before."""
    more = mask.new_full((*mask.shape[:-1], rows.shape[-1]), shown)
    return torch.cat([mask, more] if after else [more, mask], -1)


def stacked_slice(whole: torch.Tensor, count: int, index: int) -> torch.Tensor:
    """A view of one of `count` equal pieces that a parameter has along its first dimension, as those of experts are."""
    return stacked_slices(whole, count)[index]


def stacked_slices(whole: torch.Tensor, count: int) -> torch.Tensor:
    """All of them. Shapes: (count, …) as it is, (count · n, d) as (count, n, d)."""
    return whole if whole.shape[0] == count else whole.unflatten(0, (count, -1))


def with_stacked_slices(
    whole: torch.Tensor,
    count: int,
    transposed: bool,
    places: list[tuple[int, tuple[int, ...] | None]],
    values: list[torch.Tensor],
) -> torch.Tensor:
    """`whole` with new values at `places`: (number of the piece, its rows as `rows_of` takes them, or all).

    Shapes: values (rows, in), or (rows,); the pieces are stored (in, out) where `transposed`.
    """
    pieces = [piece.t() if transposed else piece for piece in stacked_slices(whole, count).unbind(0)]
    for (index, rows), value in zip(places, values, strict=True):
        new = stored_as(value, whole)
        pieces[index] = new if rows is None else with_rows(pieces[index], new, 0, *rows)
    return torch.stack([piece.t() if transposed else piece for piece in pieces]).view(whole.shape)


class Reading:
    """A module that has other values of some parameters, for one run of its code; in all else it is the module itself."""

    def __init__(self, module: Any, values: dict[str, Any]) -> None:
        vars(self)["_module"] = module
        for name, value in values.items():
            vars(self)[name] = Reading(getattr(module, name), value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_module"], name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_module"](*args, **kwargs)


def recheck_guard(value: Any, kind: str, expected: Any) -> None:
    """Asks again, where the model's own code asks, what was asked before anything had happened.

    Raises: P408 where the answer has changed in between, so that this forward would be the wrong branch.
    """
    answers: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len, "keys": list}
    answers["given"] = lambda v: "None" if v is None else getattr(v, "ndim", None)
    answer = answers.get(kind, lambda v: v)(value)
    if not isinstance(value, expected) if kind == "type" else answer != expected:
        raise PeftcError(
            Diagnostic(
                "P408",
                f"a decision of the model changed while its layer ran: expected {expected!r}, found {answer!r}",
                help="edit a smaller part of the layer, so that this code is not entered",
            )
        )


def untraced(reason: str) -> PeftcError:
    """The error of a call that goes a way which could not be traced with the values of the call before: P417."""
    return PeftcError(
        Diagnostic(
            "P417",
            "this call takes a branch of the model's code that an earlier call of its kind could not be traced through",
            notes=(reason,),
            help="edit a smaller part of the layer, so that this code is not entered",
        )
    )


def attention_with_rows(
    before: int,
    after: int,
    module: nn.Module,
    eager: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attention over keys and values to which `before` and `after` rows have been joined that every query may see.

    The mask gets open columns for them, a position bias zero columns.

    Shapes: query (batch, heads, q, d_head); key, value (batch, kv_heads, before + k + after, d_head);
    attention_mask (…, q, k).
    Raises: P402 where the attention implementation cannot take such a mask.
    """
    length = key.shape[2] - before - after
    mask = open_columns(module, query, attention_mask, length, before, after, kwargs.get("is_causal"))
    bias = kwargs.get("position_bias")
    if bias is not None:
        kwargs["position_bias"] = nn.functional.pad(bias[..., :length], (before, after))
    return attention(module, eager, query, key, value, mask, *args, **kwargs)


def function_with_rows(
    before: int,
    after: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """torch's `scaled_dot_product_attention` over keys and values with joined rows. Shapes as in `attention_with_rows`."""
    length = key.shape[2] - before - after
    if attn_mask is None and is_causal:
        attn_mask = causal(query, length)
    mask = None if attn_mask is None else opened(attn_mask, length, before, after)
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, **kwargs)


def opened(mask: torch.Tensor, length: int, before: int, after: int) -> torch.Tensor:
    """A mask, boolean or added, with open columns around those of `length` keys."""
    return nn.functional.pad(mask[..., :length], (before, after), value=mask.dtype == torch.bool)


def causal(query: torch.Tensor, length: int) -> torch.Tensor:
    """The mask of `is_causal`: aligned top left."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    return (rows >= torch.arange(length, device=query.device))[None, None]


def open_columns(
    module: Any, query: torch.Tensor, mask: Any, length: int, before: int, after: int, is_causal: bool | None
) -> torch.Tensor | BlockMask | None:
    """The mask of `length` keys, widened by columns that are open; made explicit where the implementation would have."""
    implementation: str = module.config._attn_implementation
    if implementation not in ("eager", "sdpa", "flex_attention"):
        raise PeftcError(
            Diagnostic(
                "P402",
                f"a prefix cannot be joined to the keys under attn_implementation={implementation!r}",
                notes=("the implementation takes no mask with columns that every query may see",),
                help="load the model with attn_implementation='sdpa', 'eager' or 'flex_attention'",
            )
        )
    if isinstance(mask, BlockMask):
        return opened_blocks(mask, length, before, after)
    if mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if implementation != "sdpa" or not is_causal or query.shape[2] == 1:
            return None
        mask = causal(query, length)
    return opened(mask, length, before, after)


def opened_blocks(mask: BlockMask, length: int, before: int, after: int) -> BlockMask:
    """A mask of flex attention with open columns around those of `length` keys.

    A new block overlaps two old ones; where either is looked at, and where there are open columns, it is looked at. What is
    seen in it the function of the mask decides, column by column.
    """

    def seen(batch: Any, head: Any, query: Any, column: Any) -> Any:
        old = (column - before).clamp(0, length - 1)
        return (column < before) | (column >= before + length) | mask.mask_mod(batch, head, query, old)

    total, size = before + length + after, mask.BLOCK_SIZE[1]
    looked, columns = mask.to_dense() != 0, -(-total // size)
    shift, old = before // size, looked.shape[-1]
    left, right = (nn.functional.pad(looked, (by, columns - by - old)) for by in (shift, shift + 1))
    first = torch.arange(columns, device=looked.device) * size
    looked = left | right | (first < before) | (first + size > before + length)
    count = looked.sum(-1, dtype=torch.int32)
    order = looked.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        count, order, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=seen, seq_lengths=(mask.seq_lengths[0], total)
    )


def respecialize(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call pattern that no generated forward holds for: it is traced, rewritten, added to the module's kind, and run."""
    cls: Any = type(module)
    return cls._peftc_kind.unseen(module, *args, **kwargs)
