"""An attention function with hooks for edits of q, k, v, kv and the heads, written from Eq. 1-10 of
He et al. (2022).

Masks are always explicit here (transformers builds the eager ones for it), so nothing depends on
`is_causal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "reference"
Prefix = Callable[[], tuple[Tensor, Tensor]]


@dataclass
class AttentionEdits:
    """`q`, `k`, `v`: on (batch, heads, tokens, d_head). `heads`: (h, q) -> h on (batch, tokens,
    heads, d_head).

    `prefixes` give (P_k, P_v), each (kv_heads, l, d_head), or with a batch in front. `form` chooses
    between Eq. 5 (concatenation) and Eq. 7 (gating).
    """

    q: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    k: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    v: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    heads: list[Callable[[Tensor, Tensor], Tensor]] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    form: Literal["concat", "gated"] = "concat"


def edits_of(core: nn.Module) -> AttentionEdits:
    return core.__dict__.setdefault("attention_edits", AttentionEdits())


def reference_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(q Kᵀ · scaling + bias + mask) V over [P_k; K], [P_v; V]. Returns (batch, tokens,
    heads, d_head), weights.
    """
    edits = edits_of(module)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query, key, value
    for edit in edits.q:
        q = edit(q)
    for edit in edits.k:
        k = edit(k)
    for edit in edits.v:
        v = edit(v)
    bias = torch.zeros((), dtype=q.dtype)
    if position_bias is not None:
        bias = bias + position_bias
    if attention_mask is not None:
        bias = bias + attention_mask
    prefix = _joined(edits.prefixes, q.shape[0])
    compute = _gated if edits.form == "gated" and prefix is not None else _concatenated
    h, weights = compute(q, k, v, prefix, bias, scaling, dropout, module.training)
    h = h.transpose(1, 2)
    for edit in edits.heads:
        h = edit(h, q.transpose(1, 2))
    return h, weights


def _joined(prefixes: list[Prefix], batch: int) -> tuple[Tensor, Tensor] | None:
    """Later prefixes come before earlier ones, as repeated concat(prefix, kv) puts them."""
    if not prefixes:
        return None
    rows = [tuple(p.expand(batch, -1, -1, -1) for p in prefix()) for prefix in reversed(prefixes)]
    return torch.cat([r[0] for r in rows], 2), torch.cat([r[1] for r in rows], 2)


def _scores(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """Query head i reads key head i // (heads / kv_heads)."""
    b, heads, n, d = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(b, kv_heads, heads // kv_heads, n, d)
    return torch.einsum("bgrnd,bgmd->bgrnm", grouped, k).reshape(b, heads, n, -1) * scaling


def _mix(weights: Tensor, v: Tensor) -> Tensor:
    b, heads, n, m = weights.shape
    kv_heads = v.shape[1]
    grouped = weights.reshape(b, kv_heads, heads // kv_heads, n, m)
    return torch.einsum("bgrnm,bgmd->bgrnd", grouped, v).reshape(b, heads, n, -1)


def _concatenated(q, k, v, prefix, bias, scaling, rate, training):
    """Eq. 5: the prefix's columns have neither mask nor position bias."""
    scores = _scores(q, k, scaling) + bias
    if prefix is not None:
        scores = torch.cat([_scores(q, prefix[0], scaling), scores], -1)
        v = torch.cat([prefix[1], v], 2)
    weights = drop(torch.softmax(scores, -1), rate, training)
    return _mix(weights, v), weights


def _gated(q, k, v, prefix, bias, scaling, rate, training):
    """Eq. 7-8: h = (1 - λ) Attn(q, K, V) + λ Attn(q, P_k, P_v), λ = Σ exp(q P_kᵀ) / (Σ exp(q P_kᵀ)
    + Σ exp(q Kᵀ)).
    """
    assert not (training and rate), "the gated form has no attention dropout"
    own, added = _scores(q, k, scaling) + bias, _scores(q, prefix[0], scaling)
    gate = torch.sigmoid(torch.logsumexp(added, -1, keepdim=True) - torch.logsumexp(own, -1, keepdim=True))
    one, two = torch.softmax(own, -1), torch.softmax(added, -1)
    h = (1 - gate) * _mix(one, v) + gate * _mix(two, prefix[1])
    return h, torch.cat([gate * two, (1 - gate) * one], -1)


ALL_ATTENTION_FUNCTIONS.register(NAME, reference_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
