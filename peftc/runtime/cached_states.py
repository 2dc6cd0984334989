"""The cache of a call, and what forms keep beside its keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftc.forms.past_module import Name, Past, States

CACHES = ("past_key_values", "cache_params")
STATES = ("state",)  # tensors of a recurrence; a call without a past has none. Seen in: RWKV
OTHERS = ("mems", "past_buckets_states")  # Seen in: XLNet, Reformer
CACHED_STATES = "peftc_states"  # the attribute of a cache


@dataclass(frozen=True)
class CachedStates:
    """What forms kept at a cache of `length` tokens: keys and values, (rows, tokens, features).

    `keys`: the base's own of the last token in the last layer, (rows, features). They depend on all
    tokens of a row, so they tell which row it is after a beam search has chosen among them.
    """

    length: int
    states: Mapping[Name, tuple[Tensor, Tensor]]
    keys: Tensor | None

    def of_rows(self, cache: Any, length: int) -> States | str:
        """`states` of the present rows of the cache; or why they are unknown."""
        if self.length != length:
            return f"it has {length} of the {self.length} that it had"
        keys = last_keys(cache, length)
        if keys is None or self.keys is None:
            return f"the rows of a {type(cache).__name__} cannot be recognised"
        if keys.shape[1:] != self.keys.shape[1:]:
            return "it was filled by another model"
        same = (keys.to(self.keys.device).unsqueeze(1) == self.keys).all(-1)  # (rows now, rows then)
        if not bool(same.any(1).all()):
            return "it has other tokens since"
        then = same.int().argmax(1)
        if int(same.sum()) > len(keys) and not self._agree(same, then):
            return "two of its rows have the same keys and other tokens"  # of one layer
        if torch.equal(then, torch.arange(len(self.keys), device=then.device)):
            return self.states
        return {name: (k[then.to(k.device)], v[then.to(v.device)]) for name, (k, v) in self.states.items()}

    def _agree(self, same: Tensor, then: Tensor) -> bool:
        """Whether the rows that one row may have been have one state."""
        now, row = same.nonzero().unbind(1)
        parts = (part for pair in self.states.values() for part in pair)
        return all(torch.allclose(part[row.to(part.device)], part[then[now].to(part.device)]) for part in parts)


def cache_of(arguments: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The name and value of the cache among the arguments of a call."""
    names = (*CACHES, *STATES, *OTHERS)
    return next(((name, arguments[name]) for name in names if arguments.get(name) is not None), None)


def last_keys(cache: Any, length: int) -> Tensor | None:
    """The keys of the last of so many tokens in the last layer of a cache, (rows, features)."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    keys = next((k for layer in reversed(layers) if isinstance(k := getattr(layer, "keys", None), Tensor)), None)
    if keys is None or keys.ndim != 4 or not keys.shape[2]:
        return None
    return keys[:, :, min(length, keys.shape[2]) - 1].flatten(1)


def cache_after(arguments: Mapping[str, Any], result: Any) -> Any:
    """The cache that a call has filled; None if there is none."""
    of_result = {name: getattr(result, name, None) for name in CACHES}
    return (cache_of(arguments) or cache_of(of_result) or ("", None))[1]


def cached_past(arguments: Mapping[str, Any], length: Any, mask: Tensor | None) -> Past | str:
    """What forms kept of the `length` tokens in the cache of a call; or why that is unknown."""
    cache = cache_of(arguments)
    if cache is None:
        return Past(0, mask)
    if torch.compiler.is_compiling():
        return "compiled code does not keep them"
    length = int(length)
    cached = getattr(cache[1], CACHED_STATES, None)
    if not length:
        return Past(0, mask)
    if not isinstance(cached, CachedStates):
        return Past(length, mask, "it was filled without this edit")
    return Past(length, mask, cached.of_rows(cache[1], length))


def record_states(past: Past | str, arguments: Mapping[str, Any], result: Any) -> None:
    """Records what forms keep as an attribute of the cache, which copies keep."""
    cache = None if isinstance(past, str) or not past.current else cache_after(arguments, result)
    if isinstance(past, str) or cache is None or torch.compiler.is_compiling():
        return
    if hasattr(cache, "get_seq_length"):
        length = int(cache.get_seq_length())
        keys = last_keys(cache, length)
        setattr(
            cache, CACHED_STATES, CachedStates(length, past.current, None if keys is None else keys.detach().clone())
        )
