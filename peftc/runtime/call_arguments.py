"""Tokens, masks and caches among the arguments of a call of a transformers model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor

CACHES = ("past_key_values", "cache_params")
STATES = ("state",)  # tensors of a recurrence; a call without a past has none. Seen in: RWKV
OTHERS = ("mems", "past_buckets_states")  # Seen in: XLNet, Reformer


class UnknownCache(Exception):
    """A cache whose number of tokens is unknown."""

    def __init__(self, name: str, cache: object) -> None:
        super().__init__(f"the number of tokens in `{name}`, a {type(cache).__name__}, is unknown")


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


def cache_of(arguments: dict[str, Any]) -> tuple[str, Any] | None:
    """The name and value of the cache among the arguments of a call."""
    names = (*CACHES, *STATES, *OTHERS)
    return next(((name, arguments[name]) for name in names if arguments.get(name) is not None), None)


def is_tensors(cache: Any) -> bool:
    return isinstance(cache, list | tuple) and all(isinstance(part, Tensor) for part in cast(Iterable[object], cache))


def past_of(arguments: dict[str, Any]) -> Any:
    """The number of tokens in the cache of a call, or 0; a tensor for caches of a fixed size.

    Returns: None for a recurrent state, which has tokens and does not count them.
    Raises: UnknownCache.
    """
    name, cache = cache_of(arguments) or ("", None)
    if cache is None:
        return 0
    if name in STATES and is_tensors(cache):
        return None
    if name not in CACHES:
        raise UnknownCache(name, cache)
    if (offset := getattr(cache, "seqlen_offset", None)) is not None:
        return int(offset)
    if hasattr(cache, "get_seq_length"):
        try:
            return cache.get_seq_length()
        except ValueError:  # no layer of the cache has keys
            pass
    if (has_tokens := getattr(cache, "has_previous_state", None)) is not None:
        return None if (has_tokens() if callable(has_tokens) else has_tokens) else 0
    raise UnknownCache(name, cache)
