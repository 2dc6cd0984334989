"""What a call continues: the caches and states that models hand from call to call, under the names that models give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor

CACHES = ("past_key_values", "cache_params")
STATES = ("state",)  # tensors of a recurrence, made by a call and by nothing else
OTHERS = ("mems", "past_buckets_states")


class UnknownCache(Exception):
    """A cache that does not tell whether it has tokens."""

    def __init__(self, name: str, cache: object) -> None:
        super().__init__(f"`{name}` is a {type(cache).__name__}, which does not tell how many tokens it has")


def cache_of(given: dict[str, Any]) -> tuple[str, Any] | None:
    """The cache among the arguments of a call, with its name; None where there is none."""
    names = (*CACHES, *STATES, *OTHERS)
    return next(((name, given[name]) for name in names if given.get(name) is not None), None)


def tensors(cache: Any) -> bool:
    return isinstance(cache, list | tuple) and all(isinstance(part, Tensor) for part in cast(Iterable[object], cache))


def past_of(given: dict[str, Any]) -> Any:
    """How many tokens the cache of a call has, a tensor for caches of a fixed size; 0 without one. None: it has some, and does not tell
    how many, as the state of a recurrence.

    Raises: UnknownCache.
    """
    name, cache = cache_of(given) or ("", None)
    if cache is None:
        return 0
    if name in STATES and tensors(cache):
        return None
    if name not in CACHES:
        raise UnknownCache(name, cache)
    if (offset := getattr(cache, "seqlen_offset", None)) is not None:
        return int(offset)
    if hasattr(cache, "get_seq_length"):
        try:
            return cache.get_seq_length()
        except ValueError:  # of layers none of which has keys
            pass
    if (some := getattr(cache, "has_previous_state", None)) is not None:
        return None if (some() if callable(some) else some) else 0
    raise UnknownCache(name, cache)
