"""Running a stack on more tokens than it was given. Generated code calls this; the stack's own code is run as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values

POSITIONS = ("position_ids", "cache_position")  # numbers of tokens, from 0 on
KINDS = ("token_type_ids",)  # told for each token


def prompted(
    base: type[nn.Module],
    module: Any,
    arguments: dict[str, Any],
    rest: dict[str, Any],
    rows: list[Tensor],
    embedding: str,
    keep: bool,
    context: int,
) -> Any:
    """The forward of `base`, with `rows` before the tokens of each example, and a context that is `context` tokens longer than
    its mask.

    Rows come first in a cache, too: a call that continues one is told where its tokens are. The attention mask shows the rows to
    every token; positions count from the first row. `keep`: the result has the rows, else only the tokens given.

    Shapes: rows (len, d) each, or (batch, len, d). Raises: P419 for masks that cannot be made longer, and caches without the rows.
    """
    given = longer_context({**arguments, **rest}, context) if context else {**arguments, **rest}
    count = sum(row.shape[-2] for row in rows)
    if not count:
        return base.forward(module, **given)
    cache = given.get("past_key_values")
    past = 0 if cache is None else cache.get_seq_length()
    tokens = tokens_of(given)
    if tokens is None:
        return base.forward(module, **given)  # says itself what is missing
    batch, first = tokens.shape[0], past == 0
    if (mask := given.get("attention_mask")) is not None:
        given["attention_mask"] = longer_mask(mask, batch, count, None if first else past - count + tokens.shape[1])
    elif not first:
        check_first(given.get("position_ids"), past - count)
    for name in POSITIONS:
        if (numbers := given.get(name)) is not None:
            before = torch.arange(count, dtype=numbers.dtype, device=numbers.device).expand(*numbers.shape[:-1], count)
            given[name] = torch.cat([before, numbers + count], -1) if first else numbers + count
    if not first:
        return base.forward(module, **given)
    for name in KINDS:
        if (kinds := given.get(name)) is not None:
            given[name] = torch.cat([kinds.new_zeros(*kinds.shape[:-1], count), kinds], -1)
    embedded = tokens if tokens.is_floating_point() else module.get_submodule(embedding)(tokens)
    parts = [row.to(embedded.dtype).expand(batch, -1, -1) for row in rows]
    given |= {"input_ids": None, "inputs_embeds": torch.cat([*parts, embedded], 1)}
    result = base.forward(module, **given)
    return result if keep else without(result, count)


def batch_of(arguments: dict[str, Any], rest: dict[str, Any], weight: Tensor) -> Tensor:
    """Something with the batch of a call, and the features, dtype and device of its embedding: (batch, 1, d)."""
    tokens = tokens_of({**arguments, **rest})
    return weight[:1].expand(1 if tokens is None else tokens.shape[0], 1, -1)


def tokens_of(given: dict[str, Any]) -> Tensor | None:
    """The tokens of a call, (batch, tokens), or embedded as (batch, tokens, d)."""
    return given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]


def longer_mask(mask: Any, batch: int, count: int, expected: int | None) -> Tensor:
    """A mask (batch, tokens) that shows `count` more tokens before the others. `expected`: tokens of cache and call."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        said = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        raise refused(f"an attention mask with {said} cannot be made longer by the tokens of a prompt")
    if expected is not None and mask.shape[1] != expected:
        raise refused(f"the attention mask is for {mask.shape[1]} tokens, and the cache and the call have {expected}")
    return torch.cat([mask.new_ones(batch, count), mask], 1)


def check_first(numbers: Any, expected: int) -> None:
    """Raises: P419 where the first token of a call that continues a cache is not the one behind those in it.

    Without a mask nothing else tells that `generate` has counted the tokens of the prompt as tokens of the input.
    """
    if not isinstance(numbers, Tensor) or not has_values(numbers) or torch.compiler.is_compiling():
        return
    if (first := int(numbers.reshape(-1)[0])) != expected:
        raise refused(
            f"the first token of the call has position {first}, and the cache has {expected} tokens of the input"
        )


def longer_context(given: dict[str, Any], count: int) -> dict[str, Any]:
    """A mask of the context that shows the `count` tokens which the context has before the others."""
    mask, context = given.get("encoder_attention_mask"), given.get("encoder_hidden_states")
    if not isinstance(mask, Tensor) or not isinstance(context, Tensor):
        return given
    if mask.ndim != 2 or mask.shape[1] + count != context.shape[1]:
        if mask.ndim == 2 and mask.shape[1] == context.shape[1]:
            return given  # of a context that was made without a prompt
        raise refused("the mask of the encoder's result cannot be made longer by the tokens of a prompt")
    return {**given, "encoder_attention_mask": torch.cat([mask.new_ones(mask.shape[0], count), mask], 1)}


def without(result: Any, count: int) -> Any:
    """A result whose last hidden state has only the tokens behind the first `count`."""
    if isinstance(result, tuple):
        return (result[0][:, count:], *result[1:])
    if isinstance(result, Tensor):
        return result[:, count:]
    result.last_hidden_state = result.last_hidden_state[:, count:]
    return result


def refused(message: str) -> PeftcError:
    return PeftcError(
        Diagnostic(
            "P419",
            message,
            notes=(
                "caches of a fixed size, and caches given to `generate`, are counted with the tokens of the prompt",
            ),
            help="generate with a new cache that grows (the default), and masks (batch, tokens)",
        )
    )
