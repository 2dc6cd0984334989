"""Attention over keys and values with joined rows that every query sees (prefixes)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.operations import attention


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
    """transformers' attention, where `before` and `after` of the keys are joined rows.

    The mask gets open columns for the rows, a position bias zero columns.

    Shapes: query (batch, heads, q, d_head); key, value (batch, kv_heads, before + k + after,
    d_head); attention_mask (…, q, k).
    Raises: P402 where the attention implementation cannot take such a mask.
    """
    length = key.shape[2] - before - after
    mask = open_columns(module, query, attention_mask, length, before, after, kwargs.get("is_causal"))
    bias = kwargs.get("position_bias")
    if bias is not None:
        kwargs["position_bias"] = nn.functional.pad(bias[..., :length], (before, after))
    return attention(module, eager, query, key, value, mask, *args, **kwargs)


def sdpa_with_rows(
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
    """torch's `scaled_dot_product_attention` with joined rows. Shapes: as above."""
    length = key.shape[2] - before - after
    if attn_mask is None and is_causal:
        attn_mask = causal_mask(query, length)
    mask = None if attn_mask is None else pad_mask(attn_mask, length, before, after)
    return nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout_p, **kwargs)


def pad_mask(mask: torch.Tensor, length: int, before: int, after: int) -> torch.Tensor:
    """A boolean or additive mask of `length` keys with open columns on both sides."""
    return nn.functional.pad(mask[..., :length], (before, after), value=mask.dtype == torch.bool)


def causal_mask(query: torch.Tensor, length: int) -> torch.Tensor:
    """The mask that `is_causal` stands for: aligned top left."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    return (rows >= torch.arange(length, device=query.device))[None, None]


def open_columns(
    module: Any, query: torch.Tensor, mask: Any, length: int, before: int, after: int, is_causal: bool | None
) -> torch.Tensor | BlockMask | None:
    """The mask of `length` keys with open columns; explicit if the implementation implies one."""
    implementation: str = module.config._attn_implementation
    if implementation not in ("eager", "sdpa", "flex_attention"):
        message = f"a prefix cannot be joined to the keys under attn_implementation={implementation!r}"
        notes = ("the implementation takes no mask with columns that every query may see",)
        help_ = "load the model with attn_implementation='sdpa', 'eager' or 'flex_attention'"
        raise PeftcError(Diagnostic("P402", message, notes=notes, help=help_))
    if isinstance(mask, BlockMask):
        return pad_block_mask(mask, length, before, after)
    if mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if implementation != "sdpa" or not is_causal or query.shape[2] == 1:
            return None
        mask = causal_mask(query, length)
    return pad_mask(mask, length, before, after)


def pad_block_mask(mask: BlockMask, length: int, before: int, after: int) -> BlockMask:
    """A flex attention mask of `length` keys with open columns on both sides."""
    # A new block overlaps two old ones: computed if either was, or if it has open columns.

    def mask_mod(batch: Any, head: Any, query: Any, column: Any) -> Any:
        old = (column - before).clamp(0, length - 1)
        return (column < before) | (column >= before + length) | mask.mask_mod(batch, head, query, old)

    total, size = before + length + after, mask.BLOCK_SIZE[1]
    blocks, columns = mask.to_dense() != 0, -(-total // size)
    shift, old = before // size, blocks.shape[-1]
    left, right = (nn.functional.pad(blocks, (by, columns - by - old)) for by in (shift, shift + 1))
    first = torch.arange(columns, device=blocks.device) * size
    blocks = left | right | (first < before) | (first + size > before + length)
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        count, order, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(mask.seq_lengths[0], total)
    )


# Attention that the model computes itself --------------------------------------------------------


def rows_like_operand(rows: torch.Tensor, operand: torch.Tensor, order: tuple[int, ...], merged: bool) -> torch.Tensor:
    """Rows (batch, heads, rows, d) in the layout of an operand of a product.

    Args: `order`: the operand's dimensions as indices into those of the rows; index 4 is a
    dimension of blocks of tokens. `merged`: batch and heads are one dimension of the operand.
    """
    rows = rows.to(operand.dtype)
    rows = rows.unsqueeze(-1) if len(order) == 5 else rows  # the same for each block
    return (rows.flatten(0, 1) if merged else rows).permute(order)


def scores_like(scores: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The scores of joined rows in the shape of the other scores."""
    return scores.reshape(*others.shape[:-1], scores.shape[-1])


def extend_mask(mask: torch.Tensor, scores: torch.Tensor, visible: float, after: bool) -> torch.Tensor:
    """A mask with a column of `visible` for each joined row, before or `after` the others."""
    columns = mask.new_full((*mask.shape[:-1], scores.shape[-1]), visible)
    return torch.cat([mask, columns] if after else [columns, mask], -1)
