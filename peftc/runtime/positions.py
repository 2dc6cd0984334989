"""Tokens, masks and caches among the arguments of a call, and the positions of its tokens."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.diagnostics import PeftcError
from peftc.forms.module import has_values
from peftc.forms.sequence_module import PADDING, Ids, Sequence, Where, unknown
from peftc.runtime.cached_states import (
    CACHES,
    STATES,
    cache_after,
    cache_of,
    cached_past,
    last_keys,
    record_states,
)

CACHED = "peftc_ids"  # the attribute of a cache


def tokens_of(arguments: Mapping[str, Any]) -> Any:
    """The tokens of a call: ids (batch, tokens), or embeddings (batch, tokens, d)."""
    embedded = arguments.get("inputs_embeds")
    return arguments.get("input_ids") if embedded is None else embedded


def starts_of(mask: Tensor) -> Tensor:
    """The column of each row's first visible token, (batch, 1); 0 if all are padding."""
    return (mask != 0).int().argmax(1, keepdim=True)


def mask_format(mask: object) -> str:
    """How a mask that is not (batch, tokens) differs from that, for messages."""
    return f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"


def past_of(arguments: dict[str, Any], error: Callable[[str], PeftcError]) -> Any:
    """The tokens in the cache of a call, or 0; a tensor for caches of a fixed size.

    Returns: None for a recurrent state, which does not count them. Raises: an `error`.
    """
    name, cache = cache_of(arguments) or ("", None)
    if cache is None:
        return 0
    is_list = isinstance(cache, list | tuple)
    if name in STATES and is_list and all(isinstance(part, Tensor) for part in cast(Iterable[object], cache)):
        return None
    message = f"the number of tokens in `{name}`, a {type(cache).__name__}, is unknown"
    if name not in CACHES:
        raise error(message)
    if (offset := getattr(cache, "seqlen_offset", None)) is not None:
        return int(offset)
    if hasattr(cache, "get_seq_length"):
        try:
            return cache.get_seq_length()
        except ValueError:  # no layer of the cache has keys
            pass
    if (has_tokens := getattr(cache, "has_previous_state", None)) is not None:
        return None if (has_tokens() if callable(has_tokens) else has_tokens) else 0
    raise error(message)


def forward_with_positions(base: type[nn.Module], module: Any, named: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The forward of `base`; meanwhile forms know the positions of its tokens. Raises: P423."""
    arguments = {**named, **rest}
    sequence: Sequence = module.peftc.sequence
    if getattr(module, "_is_replica", False):
        message = "replicas in threads share one record of the positions of a call's tokens"
        raise unknown(message, "use DistributedDataParallel")
    before, sequence.present = sequence.present, positions_of(arguments)
    try:
        result = base.forward(module, **arguments)
        if sequence.tokens and sequence.present is not None:
            record_ids(sequence.present, sequence.tokens, arguments, result)
        if sequence.present is not None:
            record_states(sequence.present.past, arguments, result)
        return result
    finally:
        sequence.present = before


def forward_with_offset(
    base: type[nn.Module], module: Any, named: dict[str, Any], rest: dict[str, Any], count: int
) -> Any:
    """The forward of `base` with positions that count `count` rows before the tokens.

    Position ids are those of the call, or count the tokens of each row from the first visible one.
    Raises: P423 where the number of tokens in the cache is unknown.
    """
    arguments = {**named, **rest}
    if (tokens := tokens_of(arguments)) is None:  # the base raises its own error
        return base.forward(module, **arguments)
    ids = arguments.get("position_ids")
    if ids is None:
        mask, past = arguments.get("attention_mask"), past_of(arguments, unknown)
        ids = torch.arange(tokens.shape[1], device=tokens.device)[None] + (0 if past is None else past)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            ids = (ids - starts_of(mask)).clamp(min=0)
    return base.forward(module, **{**arguments, "position_ids": ids + count})


@dataclass(frozen=True)
class CachedIds:
    """What is recorded at a cache of `length` tokens: by id, which of its rows have it, (rows,).

    `keys`: of the last token in the last layer, (rows, features). They depend on all tokens of a
    row, so they tell which row it is after a beam search has chosen among them.
    """

    length: int
    begun: Mapping[int, Tensor]
    keys: Tensor | None

    def begun_now(self, cache: Any, count: int) -> dict[int, Tensor | None]:
        """`begun` of the present rows, so many; None where rows differ and cannot be recognised.

        Empty if the tokens are others than those that were recorded.
        """
        keys, same = last_keys(cache, self.length), None
        if keys is not None and self.keys is not None:
            if len(keys) != count or keys.shape[1:] != self.keys.shape[1:]:
                return {}
            same = (keys.to(self.keys.device).unsqueeze(1) == self.keys).all(-1)  # (rows now, rows then)
            if not bool(same.any(1).all()):
                return {}
        return {token: self._rows(begun, same, count) for token, begun in self.begun.items()}

    @staticmethod
    def _rows(begun: Tensor, same: Tensor | None, count: int) -> Tensor | None:
        if bool((begun == begun[0]).all()):
            return begun[:1].expand(count)
        if same is None:
            return None
        same = same.to(begun.device)
        has, has_not = (same & begun).any(1), (same & ~begun).any(1)
        return has if bool((has != has_not).all()) else None


def ids_of(arguments: dict[str, Any], past: Any) -> Ids | str:
    """The ids of a call and of its cache, of `past` tokens; else why they are unknown."""
    ids, mask, cache = arguments.get("input_ids"), arguments.get("attention_mask"), cache_of(arguments)
    if not isinstance(ids, Tensor) or arguments.get("inputs_embeds") is not None:
        return "the stack is called with embeddings"
    if cache is not None and torch.compiler.is_compiling():
        return "compiled code does not record those of a cache"
    past = int(past) if cache is not None else 0
    if mask is not None:
        ids = ids.masked_fill(mask[:, past : past + ids.shape[1]] == 0, PADDING)
    if cache is None or not past:
        return Ids(ids)
    cached = getattr(cache[1], CACHED, None)
    if not isinstance(cached, CachedIds) or cached.length != past:
        return Ids(ids, {})
    return Ids(ids, cached.begun_now(cache[1], len(ids)))


def record_ids(where: Where, tokens: Iterable[int], arguments: dict[str, Any], result: Any) -> None:
    """Records which `tokens` rows of a cache have, as its attribute, which copies keep."""
    ids = where.ids
    cache = cache_after(arguments, result)
    if isinstance(ids, str) or cache is None or torch.compiler.is_compiling() or not hasattr(cache, "get_seq_length"):
        return
    known = [token for token in tokens if ids.begun is None or ids.begun.get(token) is not None]
    length = int(cache.get_seq_length())
    keys = last_keys(cache, length)
    begun = {token: ids.since(token)[:, -1] for token in known}
    setattr(cache, CACHED, CachedIds(length, begun, None if keys is None else keys.detach().clone()))


def positions_of(arguments: dict[str, Any]) -> Where | None:
    """The columns of a call's tokens, from the first and the last visible token of their rows.

    Returns: None for a call without tokens. Raises: P423 where the positions are unknown.
    """
    tokens = tokens_of(arguments)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    count, cache, mask = tokens.shape[1], cache_of(arguments), arguments.get("attention_mask")
    past = past_of(arguments, unknown)
    if past is None:
        raise unknown("the number of tokens in the recurrent state of this call is unknown", "call without a cache")
    columns = torch.arange(count, device=tokens.device)[None] + past
    if mask is None:
        ids, compiling = arguments.get("position_ids"), torch.compiler.is_compiling()
        known = ids if isinstance(ids, Tensor) and ids.ndim == 2 and has_values(ids) and not compiling else None
        if known is not None and bool((known.diff(dim=1) != 1).any()):
            message = "the position ids are not those of one sequence a row"
            raise unknown(message, "pass an attention mask (batch, tokens)")
        behind = None if cache is not None else count - 1 - columns
        return Where(columns, behind, ids_of(arguments, past), cached_past(arguments, past, None))
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        message = f"an attention mask with {mask_format(mask)} does not show which tokens are padding"
        raise unknown(message, "pass it as (batch, tokens); for a static cache, `generate` makes another")
    if (cache is None and mask.shape[1] != count) or (isinstance(past, int) and mask.shape[1] < past + count):
        raise unknown(f"the attention mask is for {mask.shape[1]} tokens, and cache and call have {past + count}")
    first = starts_of(mask)
    behind = None if cache is not None else count - 1 - starts_of(mask.flip(1)) - columns
    return Where(columns - first, behind, ids_of(arguments, past), cached_past(arguments, past, mask != 0))
