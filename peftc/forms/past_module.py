"""What forms keep of the tokens in a cache: keys and values of attentions of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from peftc.diagnostics import Diagnostic, PeftcError

Name = tuple[str, int]  # of a form, and the number of its call in a forward
States = Mapping[Name, tuple[Tensor, Tensor]]  # keys and values: (rows, tokens, features)
OTHER_CALL = "begin with an empty cache, or call the model without one"


@dataclass
class Past:
    """What the forms of a stack know of the tokens of a call and of its cache.

    Attributes:
        length: the tokens in the cache.
        mask: which tokens of cache and call are none of padding, (rows, tokens); None: all.
        states: what forms kept of the tokens in the cache, for the rows of the call; or why that is
            unknown.
        current: the keys and values of cache and call, of the forms that have run in this call.
    """

    length: int
    mask: Tensor | None = None
    states: States | str = field(default_factory=dict)
    current: dict[Name, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, rows: slice | Tensor) -> Past:
        """Those of some rows of the batch, of which no cache is kept."""
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[rows]
        return Past(self.length, mask, "the batch has several tasks")

    def extended(self, form: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of cache and call. Raises: P423 where those of the cache are unknown."""
        name = form, sum(other == form for other, _ in self.current)
        if self.length:
            if isinstance(self.states, str):
                raise unknown_past(self.states)
            if name not in self.states:
                raise unknown_past("the cache was cropped, or filled without this edit, or for another task")
            own_keys, own_values = self.states[name]
            keys = torch.cat([own_keys.to(keys), keys], 1)
            values = torch.cat([own_values.to(values), values], 1)
        self.current[name] = keys.detach(), values.detach()
        return keys, values

    def visible(self, queries: int, device: torch.device) -> Tensor:
        """Which tokens each token of the call sees: those before it that are none of padding, and
        itself, (rows or 1, 1, queries, tokens).
        """
        count = self.length + queries
        columns = torch.arange(count, device=device)
        own = columns[self.length :, None]
        seen = (columns <= own)[None]
        if self.mask is not None:
            seen = seen & (self.mask[:, None, :count].to(device) | (columns == own))
        return seen[:, None]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, past: Past, heads: int) -> Tensor:
    """softmax(q kᵀ / √e) v in each head, over the tokens up to each one.

    Shapes: q, k: (rows, tokens, heads · e); v and the result: (rows, tokens, heads · e_v)
    """
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = past.visible(q.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def unknown_past(reason: str) -> PeftcError:
    message = f"an attention of an edit does not know the tokens of the cache: {reason}"
    return PeftcError(Diagnostic("P423", message, help=OTHER_CALL))
