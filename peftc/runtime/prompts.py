"""Running a stack on more tokens than it was given. Generated code calls this; the stack's own code is run as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.runtime.caches import UnknownCache, past_of

POSITIONS = ("position_ids", "cache_position")  # numbers of tokens, from 0 on
# Told for each token; a row is one of text, and no image.
KINDS = ("token_type_ids", "mm_token_type_ids", "visual_pos_masks")
TOKENS = ("input_ids", "inputs_embeds")
CONTEXT = "encoder_"  # begins the names of what is told of another stack


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

    Rows stand directly before the first token of each example, behind its padding, and so they do in a cache: a call that
    continues one is told where its tokens are. The attention mask shows the rows to every token; positions go on from row to
    token. `keep`: the result has the rows, else only the tokens given.

    Shapes: rows (len, d) each, or (batch, len, d). Raises: P419 for masks that cannot be made longer, and caches without the
    rows; P428 for a row whose first token is behind padding in a cache.
    """
    given = longer_context({**arguments, **rest}, context) if context else {**arguments, **rest}
    count = sum(row.shape[-2] for row in rows)
    if not count:
        return base.forward(module, **given)
    tokens = tokens_of(given)
    if tokens is None:
        return base.forward(module, **given)  # says itself what is missing
    past = known_past(given)
    if past is None:
        return base.forward(module, **continued(given, tokens, count))
    first = past == 0
    if first and (reason := unjoinable(given)) is not None:
        raise refused(reason)
    starts = None
    if (mask := given.get("attention_mask")) is not None:
        starts = starts_of(checked_mask(mask, None if first else past - count + tokens.shape[1]))
        if not first:
            check_rows(starts, past - count)
        given["attention_mask"] = joined(mask.new_ones(count), mask, starts)
    elif not first:
        check_first(given.get("position_ids"), past - count)
    given |= {
        name: longer_numbers(given[name], count, starts, first) for name in POSITIONS if given.get(name) is not None
    }
    if not first:
        return base.forward(module, **given)
    if starts is not None and "position_ids" in given and given["position_ids"] is None:
        given["position_ids"] = counted(module, embedding, starts, count + tokens.shape[1])
    for name in KINDS:
        if (kinds := given.get(name)) is not None:
            given[name] = joined(kinds.new_zeros(count), kinds, starts)
    embedded = tokens if tokens.is_floating_point() else module.get_submodule(embedding)(tokens)
    together = [row.to(embedded.dtype).expand(len(tokens), -1, -1) for row in rows]
    given |= {"input_ids": None, "inputs_embeds": joined(torch.cat(together, 1), embedded, starts)}
    result = base.forward(module, **given)
    return result if keep else without(result, count, starts, tokens.shape[1])


def known_past(given: dict[str, Any]) -> Any:
    """`past_of`. Raises: P419 for a cache of which it cannot be told whether the rows are in it."""
    try:
        return past_of(given)
    except UnknownCache as cannot:
        raise refused(str(cannot)) from cannot


def continued(given: dict[str, Any], tokens: Tensor, count: int) -> dict[str, Any]:
    """The arguments of a call that continues the state of a recurrence: the rows are in it, and its masks are of the call alone.

    Raises: P428 for a row whose first token is behind padding in the state.
    """
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > tokens.shape[1]:
        check_rows(starts_of(mask), mask.shape[1] - tokens.shape[1])
    numbers = {name: given[name] for name in POSITIONS if given.get(name) is not None}
    return given | {name: longer_numbers(value, count, None, first=False) for name, value in numbers.items()}


def starts_of(mask: Tensor) -> Tensor:
    """The column of the first token of each row that the mask shows, (batch, 1); 0 for a row of padding alone."""
    return (mask != 0).int().argmax(1, keepdim=True)


def joined(rows: Tensor, values: Tensor, starts: Tensor | None) -> Tensor:
    """Values of tokens with `rows` directly before the first token of each example; at the front without `starts`.

    Shapes: values (batch, tokens, …); rows (batch, len, …), or (len, …) where each example has the same; starts (batch, 1).
    """
    if rows.ndim < values.ndim:
        rows = rows.expand(len(values), *rows.shape)
    if starts is None:
        return torch.cat([rows, values], 1)
    count = rows.shape[1]
    columns = torch.arange(count + values.shape[1], device=values.device)[None]
    before = torch.where(columns < starts, columns + count, columns - starts)
    return picked(torch.cat([rows, values], 1), torch.where(columns < starts + count, before, columns))


def picked(values: Tensor, columns: Tensor) -> Tensor:
    """The values of each example at its columns. Shapes: values (batch, tokens, …), columns (batch, count)."""
    columns = columns.expand(len(values), -1)
    rest = values.shape[2:]
    return values.gather(1, columns.view(*columns.shape, *(1 for _ in rest)).expand(*columns.shape, *rest))


def longer_numbers(numbers: Tensor, count: int, starts: Tensor | None, first: bool) -> Tensor:
    """Positions of tokens, and of the rows before them where these are in the call: they go on from row to token."""
    if not first:
        return numbers + count
    if numbers.ndim > 2:  # several numbers a token
        return torch.stack([longer_numbers(each, count, starts, first) for each in numbers])
    rows = torch.arange(count, dtype=numbers.dtype, device=numbers.device)
    if starts is None or numbers.ndim < 2:
        return torch.cat([rows.expand(*numbers.shape[:-1], count), numbers + count], -1)
    batch = max(len(numbers), len(starts))
    numbers, starts = numbers.expand(batch, -1), starts.expand(batch, -1)
    return joined(numbers.gather(1, starts) + rows, numbers + count, starts)


def counted(module: nn.Module, embedding: str, starts: Tensor, count: int) -> Tensor | None:
    """The positions of `count` tokens where the model counts ids that are no padding: of these tokens it has no ids. None for
    other models.

    Such a model has a row for padding in its table of positions, and the first token is in the next row.
    """
    tokens, beside = module.get_submodule(embedding), module.get_submodule(embedding.rpartition(".")[0])
    tables = (m for m in beside.children() if isinstance(m, nn.Embedding) and m is not tokens)
    padding = next((table.padding_idx for table in tables if table.padding_idx is not None), None)
    if padding is None:
        return None
    return (torch.arange(1, count + 1, device=starts.device)[None] - starts).clamp(min=0) + padding


def batch_of(arguments: dict[str, Any], rest: dict[str, Any], weight: Tensor) -> Tensor:
    """Something with the batch of a call, and the features, dtype and device of its embedding: (batch, 1, d)."""
    tokens = tokens_of({**arguments, **rest})
    return weight[:1].expand(1 if tokens is None else tokens.shape[0], 1, -1)


def tokens_of(given: Mapping[str, Any]) -> Tensor | None:
    """The tokens of a call, (batch, tokens), or embedded as (batch, tokens, d)."""
    return given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]


def unjoinable(given: Mapping[str, Any]) -> str | None:
    """Why the arguments of a call have no place for rows: something in them is told of each token, and of no row."""
    mask, tokens = given.get("attention_mask"), tokens_of(given)
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        kind = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        return f"an attention mask with {kind} cannot be made longer by the tokens of a prompt"
    if tokens is None:
        return None
    known = {*TOKENS, *POSITIONS, *KINDS, "attention_mask"}
    for name, value in given.items():
        if name in known or name.startswith(CONTEXT) or not isinstance(value, Tensor) or value.ndim < 2:
            continue
        if value.shape[:2] == tokens.shape[:2] and (value.ndim > 2 or not value.is_floating_point()):
            return f"`{name}` has values of each token, and the tokens of a prompt have none"
    return None


def checked_mask(mask: Any, expected: int | None) -> Tensor:
    """A mask (batch, tokens). `expected`: tokens of cache and call. Raises: P419 for any other."""
    if (reason := unjoinable({"attention_mask": mask})) is not None:
        raise refused(reason)
    if expected is not None and mask.shape[1] != expected:
        raise refused(f"the attention mask is for {mask.shape[1]} tokens, and the cache and the call have {expected}")
    return mask


def check_rows(starts: Tensor, past: int) -> None:
    """Raises: P428 where a row of a cache with `past` tokens of the input has only padding there: its first token is in this
    call, and its prompt stands before the padding.
    """
    if not has_values(starts) or torch.compiler.is_compiling() or not bool((starts >= past).any()):
        return
    message = "a row of the batch begins in a call that continues a cache, and its prompt is behind padding there"
    help_ = "let the first call have a token of each row"
    raise PeftcError(Diagnostic("P428", message, help=help_))


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
    return {**given, "encoder_attention_mask": joined(mask.new_ones(count), mask, starts_of(mask))}


def without(result: Any, count: int, starts: Tensor | None, tokens: int) -> Any:
    """A result whose last hidden state has only the `tokens` that were given, and not the `count` of the prompt.

    Raises: P419 where it has others besides, of an image, say: which are the prompt's is not known.
    """
    states = result if isinstance(result, Tensor) else result[0]
    if states.shape[1] != tokens + count:
        raise refused(
            f"the call has {tokens} tokens and {count} of the prompt, and the stack returns {states.shape[1]}"
        )
    states = tokens_behind(states, count, starts)
    if isinstance(result, tuple):
        return (states, *result[1:])
    if isinstance(result, Tensor):
        return states
    result.last_hidden_state = states
    return result


def tokens_behind(values: Tensor, count: int, starts: Tensor | None) -> Tensor:
    """The values of the tokens that were given. Shapes: values (batch, len + tokens, …)."""
    if starts is None:
        return values[:, count:]
    columns = torch.arange(values.shape[1] - count, device=values.device)[None]
    return picked(values, torch.where(columns < starts, columns, columns + count))


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
