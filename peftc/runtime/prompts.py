"""Forwards of stacks whose input has the rows of a prompt before its tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.runtime.positions import mask_format, past_of, starts_of, tokens_of

POSITIONS = ("position_ids", "cache_position")  # consecutive numbers of tokens
KINDS = ("token_type_ids", "mm_token_type_ids", "visual_pos_masks")  # a prompt's rows have kind 0: text
TOKENS = ("input_ids", "inputs_embeds")
CONTEXT = "encoder_"  # the prefix of arguments about another stack's tokens


def forward_with_prompt(
    base: type[nn.Module],
    module: Any,
    named: dict[str, Any],
    rest: dict[str, Any],
    rows: list[Tensor],
    embedding: str,
    keep: bool,
    context: int,
) -> Any:
    """The forward of `base` with `rows` before the tokens of each example.

    The rows stand between an example's padding and its first token, in the cache too. Every token
    sees them, and positions count them.

    Args: `embedding`: the module that embeds ids. `keep`: the result keeps the rows. `context`: how
    many tokens the encoder's states are longer than their mask.
    Shapes: rows (len, d), or (batch, len, d).
    Raises: P419 for masks and caches that cannot have rows; P428 for padding before them.
    """
    arguments = {**named, **rest}
    if context:
        arguments = extend_context_mask(arguments, context)
    count = sum(row.shape[-2] for row in rows)
    tokens = tokens_of(arguments)
    if not count or tokens is None:  # without tokens the base raises its own error
        return base.forward(module, **arguments)
    past = past_of(arguments, refusal)
    if past is None:  # a recurrent state, whose mask is of this call alone
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > tokens.shape[1]:
            check_starts(starts_of(mask), mask.shape[1] - tokens.shape[1])
        return base.forward(module, **shift_positions(arguments, count))
    if past != 0:
        return base.forward(module, **shift_cached_call(arguments, tokens, count, past - count))
    if (reason := cannot_prepend(arguments)) is not None:
        raise refusal(reason)
    mask = arguments.get("attention_mask")
    starts = None if mask is None else starts_of(mask)
    result = base.forward(module, **prepend_rows(module, arguments, tokens, rows, starts, embedding))
    return result if keep else without_rows(result, count, starts, tokens.shape[1])


def prepend_rows(
    module: nn.Module,
    arguments: dict[str, Any],
    tokens: Tensor,
    rows: list[Tensor],
    starts: Tensor | None,
    embedding: str,
) -> dict[str, Any]:
    """The arguments of a call without a cache, with rows before its tokens."""
    embedded = tokens if tokens.is_floating_point() else module.get_submodule(embedding)(tokens)
    prompt = torch.cat([row.to(embedded.dtype).expand(len(tokens), -1, -1) for row in rows], 1)
    count, arguments = prompt.shape[1], dict(arguments)
    for name, value in arguments.items():
        if name in POSITIONS and value is not None:
            arguments[name] = extend_positions(value, count, starts)
        elif name == "position_ids" and starts is not None:
            arguments[name] = offset_position_ids(module, embedding, starts, count + tokens.shape[1])
        elif name in KINDS and value is not None:
            arguments[name] = insert_rows(value.new_zeros(count), value, starts)
        elif name == "attention_mask" and value is not None:
            arguments[name] = insert_rows(value.new_ones(count), value, starts)
    return arguments | {"input_ids": None, "inputs_embeds": insert_rows(prompt, embedded, starts)}


def batch_like(named: dict[str, Any], rest: dict[str, Any], weight: Tensor) -> Tensor:
    """(batch, 1, d) with the batch of a call, and dtype and device of its embedding's weight."""
    tokens = tokens_of({**named, **rest})
    return weight[:1].expand(1 if tokens is None else tokens.shape[0], 1, -1)


# Rows among tokens -------------------------------------------------------------------------------


def insert_rows(rows: Tensor, values: Tensor, starts: Tensor | None) -> Tensor:
    """Values of tokens with `rows` directly before each example's first token, or in front.

    Shapes: values (batch, tokens, …); rows (batch, len, …), or (len, …) where all examples have the
    same; starts (batch, 1).
    """
    if rows.ndim < values.ndim:
        rows = rows.expand(len(values), *rows.shape)
    if starts is None:
        return torch.cat([rows, values], 1)
    count = rows.shape[1]
    columns = torch.arange(count + values.shape[1], device=values.device)[None]
    before = torch.where(columns < starts, columns + count, columns - starts)
    return gather_columns(torch.cat([rows, values], 1), torch.where(columns < starts + count, before, columns))


def gather_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Values (batch, tokens, …) of each example at its columns (batch, count)."""
    columns = columns.expand(len(values), -1)
    features = values.shape[2:]
    return values.gather(1, columns.view(*columns.shape, *(1 for _ in features)).expand(*columns.shape, *features))


def without_rows(result: Any, count: int, starts: Tensor | None, tokens: int) -> Any:
    """A stack's result with the last hidden states of the `tokens` of the input only.

    Raises: P419 where it has states of further tokens (of an image): the prompt's are unknown.
    """
    states = result if isinstance(result, Tensor) else result[0]
    if states.shape[1] != tokens + count:
        rows = f"{tokens} tokens and {count} of the prompt"
        raise refusal(f"the call has {rows}, and the stack returns {states.shape[1]}")
    if starts is None:
        states = states[:, count:]
    else:
        columns = torch.arange(tokens, device=states.device)[None]
        states = gather_columns(states, torch.where(columns < starts, columns, columns + count))
    if isinstance(result, tuple):
        return (states, *result[1:])
    if isinstance(result, Tensor):
        return states
    result.last_hidden_state = states
    return result


# Arguments of the call ---------------------------------------------------------------------------


def shift_cached_call(arguments: dict[str, Any], tokens: Tensor, count: int, past: Any) -> dict[str, Any]:
    """The arguments of a call whose cache has `past` tokens of the input. Raises: P419, P428."""
    mask, expected = arguments.get("attention_mask"), past + tokens.shape[1]
    if mask is None:
        # Only the first position shows that `generate` has counted the prompt's rows as tokens.
        positions = arguments.get("position_ids")
        if isinstance(positions, Tensor) and has_values(positions) and not torch.compiler.is_compiling():
            first = int(positions.reshape(-1)[0])
            if first != past:
                tokens_in_cache = f"the cache has {past} tokens of the input"
                raise refusal(f"the first token of the call has position {first}, and {tokens_in_cache}")
        return shift_positions(arguments, count)
    if (reason := cannot_prepend({"attention_mask": mask})) is not None:
        raise refusal(reason)
    if mask.shape[1] != expected:
        raise refusal(f"the attention mask is for {mask.shape[1]} tokens, and the cache and the call have {expected}")
    starts = starts_of(mask)
    check_starts(starts, past)
    return shift_positions(arguments, count) | {"attention_mask": insert_rows(mask.new_ones(count), mask, starts)}


def shift_positions(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    return arguments | {name: arguments[name] + count for name in POSITIONS if arguments.get(name) is not None}


def extend_positions(positions: Tensor, count: int, starts: Tensor | None) -> Tensor:
    """Positions of a prompt's rows and of the tokens behind them."""
    if positions.ndim > 2:  # several numbers a token
        return torch.stack([extend_positions(each, count, starts) for each in positions])
    rows = torch.arange(count, dtype=positions.dtype, device=positions.device)
    if starts is None or positions.ndim < 2:
        return torch.cat([rows.expand(*positions.shape[:-1], count), positions + count], -1)
    batch = max(len(positions), len(starts))
    positions, starts = positions.expand(batch, -1), starts.expand(batch, -1)
    return insert_rows(positions.gather(1, starts) + rows, positions + count, starts)


def offset_position_ids(module: nn.Module, embedding: str, starts: Tensor, count: int) -> Tensor | None:
    """Position ids with `padding_idx` as the offset; None for a table without a row for padding."""
    # Seen in: RoBERTa, XLM-R, MPNet
    tokens, parent = module.get_submodule(embedding), module.get_submodule(embedding.rpartition(".")[0])
    tables = (m for m in parent.children() if isinstance(m, nn.Embedding) and m is not tokens)
    padding = next((table.padding_idx for table in tables if table.padding_idx is not None), None)
    if padding is None:
        return None
    return (torch.arange(1, count + 1, device=starts.device)[None] - starts).clamp(min=0) + padding


def extend_context_mask(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments with an encoder mask that shows the `count` rows of the prompt."""
    mask, states = arguments.get("encoder_attention_mask"), arguments.get("encoder_hidden_states")
    if not isinstance(mask, Tensor) or not isinstance(states, Tensor):
        return arguments
    if mask.ndim != 2 or mask.shape[1] + count != states.shape[1]:
        if mask.ndim == 2 and mask.shape[1] == states.shape[1]:
            return arguments  # the encoder ran without the prompt
        raise refusal("the mask of the encoder's result cannot be extended by the tokens of a prompt")
    return {**arguments, "encoder_attention_mask": insert_rows(mask.new_ones(count), mask, starts_of(mask))}


# Calls that are refused --------------------------------------------------------------------------


def cannot_prepend(arguments: Mapping[str, Any]) -> str | None:
    """Why rows cannot join the arguments: one has a value for each token, and none for rows."""
    mask, tokens = arguments.get("attention_mask"), tokens_of(arguments)
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        return f"an attention mask with {mask_format(mask)} cannot be extended by the tokens of a prompt"
    if tokens is None:
        return None
    known = {*TOKENS, *POSITIONS, *KINDS, "attention_mask"}
    for name, value in arguments.items():
        if name in known or name.startswith(CONTEXT) or not isinstance(value, Tensor) or value.ndim < 2:
            continue
        if value.shape[:2] == tokens.shape[:2] and (value.ndim > 2 or not value.is_floating_point()):
            return f"`{name}` has values of each token, and the tokens of a prompt have none"
    return None


def check_starts(starts: Tensor, past: int) -> None:
    """Raises: P428 for an example with only padding in the cache: its prompt is before that."""
    if not has_values(starts) or torch.compiler.is_compiling() or not bool((starts >= past).any()):
        return
    message = "an example of the batch has only padding in the cache, so its prompt is separated from its first token"
    help_ = "let the first call have a token of each example"
    raise PeftcError(Diagnostic("P428", message, help=help_))


def refusal(message: str) -> PeftcError:
    note = "a cache of a fixed size, and one passed to `generate`, counts the tokens of the prompt as input"
    help_ = "generate with a new cache that grows (the default), and masks (batch, tokens)"
    return PeftcError(Diagnostic("P419", message, notes=(note,), help=help_))
