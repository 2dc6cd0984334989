"""Where the tokens of a call stand in their sequences: told by the stack that takes them, read by forms that pick positions."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.past_module import Past

PADDING = -1  # in the place of an id


@dataclass(frozen=True)
class Ids:
    """The ids of the tokens of one call, (batch, tokens), with -1 for padding.

    `begun`: by id, which rows of the cache have it, (batch,); None where their order is unknown. None without a cache.
    """

    own: Tensor
    begun: Mapping[int, Tensor | None] | None = None

    def since(self, token: int) -> Tensor:
        """Which tokens of the call are the first `token` of their row or come after it, (batch, tokens). Raises: P423."""
        since = (self.own == token).cumsum(1) > 0
        if self.begun is None:
            return since
        if token not in self.begun:
            message = (
                f"whether the token {token} is in the cache is unknown: it was cropped, or filled without the edit"
            )
            raise unknown(message, "begin with an empty cache, or call the model without one")
        begun = self.begun[token]
        if begun is None:
            message = f"the token {token} is in some rows of the cache and not in others, whose order is unknown"
            raise unknown(message, "generate for these rows apart, or call the model without a cache")
        return since | begun.unsqueeze(1)

    def of(self, rows: slice | Tensor) -> Ids:
        """Those of some rows of the batch."""
        begun = None if self.begun is None else {t: b if b is None else b[rows] for t, b in self.begun.items()}
        return Ids(self.own[rows], begun)


@dataclass(frozen=True)
class Where:
    """The places of the tokens of one call, (batch or 1, tokens) each.

    `ahead`: how many tokens of the sequence come before, those of a cache too; negative for padding on the left. `behind`: how
    many come after; negative for padding on the right; None where the call has a cache, since more are to come. `ids`: of the
    tokens, or why they are unknown. `past`: what attentions of forms know of the tokens in a cache, or why it is unknown.
    """

    ahead: Tensor
    behind: Tensor | None
    ids: Ids | str
    past: Past | str

    def of(self, rows: slice | Tensor) -> Where:
        """Those of some rows of the batch."""
        ahead, behind = (p if p is None or len(p) == 1 else p[rows] for p in (self.ahead, self.behind))
        assert ahead is not None
        ids = self.ids if isinstance(self.ids, str) else self.ids.of(rows)
        return Where(ahead, behind, ids, self.past if isinstance(self.past, str) else self.past.of(rows))


class Sequence:
    """What the forms of a stack know of the call that the stack is running; `present` is None outside of one.

    `tokens`: the ids from which on forms act.
    """

    def __init__(self) -> None:
        self.present: Where | None = None
        self.tokens: frozenset[int] = frozenset()

    @contextmanager
    def narrowed(self, rows: slice | Tensor) -> Generator[None]:
        """Inside of the block the call has these rows of its batch alone."""
        before = self.present
        if before is not None:
            self.present = before.of(rows.to(before.ahead.device) if isinstance(rows, Tensor) else rows)
        try:
            yield
        finally:
            self.present = before


def past_of(sequence: Sequence | None, h: Tensor) -> Past:
    """What is known of the cache of a call that computes h (batch, tokens, d).

    Raises: P423 outside of a call of the stack, for tokens that are not the stack's, and where the cache is unknown.
    """
    past = present_at(sequence, h).past
    if isinstance(past, str):
        raise unknown(f"an attention of an edit does not know the tokens of the cache: {past}")
    return past


def present_at(sequence: Sequence | None, h: Tensor) -> Where:
    """The places of the tokens of h. Raises: P423 outside of a call of the stack, for tokens that are not the stack's."""
    where = None if sequence is None else sequence.present
    if where is None:
        raise unknown(
            "the layer is run outside of a call of its stack",
            "gradient checkpointing does so; train without it, or edit all positions",
        )
    if h.ndim != 3 or h.shape[1] != where.ahead.shape[1]:
        raise unknown(f"the site has the shape {tuple(h.shape)}, and the stack {where.ahead.shape[1]} tokens")
    return where


def selected(first: int | None, last: int | None, token: int | None, sequence: Sequence | None, h: Tensor) -> Tensor:
    """Which tokens of h (batch, tokens, d) are among the first or the last of their sequence, or from `token` on: (batch or 1, tokens, 1).

    Padding is no token of it, on either side: the stack tells which columns of the mask it is given
    (`peftc.runtime.positions`). With a cache, tokens count from the start of the cache, so that generation with and without
    one give the same; the first tokens are selected even where the prompt has fewer. The last ones count from the end of what
    a call is given, and a call with a cache is refused: pyreft edits the end of the prompt in the first call, which without a
    cache would be at another place with every token. AdapterHub edits the first tokens of every call with a cache, so that
    all that is generated is edited.

    `token` is an id. Its first visible place in a row counts, so that what comes later changes nothing before it, and a cache
    stays valid. Which ids a cache has is recorded at the cache (`peftc.runtime.positions`).

    Raises: P423 outside of a call of the stack, for tokens that are not the stack's, for `last` with a cache, and for `token`
    where ids are unknown, or where only some rows of the cache have it.
    """
    where = present_at(sequence, h)
    keep = torch.zeros_like(where.ahead, dtype=torch.bool)
    if first is not None:
        keep = keep | ((where.ahead >= 0) & (where.ahead < first))
    if last is not None:
        if where.behind is None:
            raise unknown(
                "the call has a cache, so its last token is not the last of the sequence",
                "use `first=`, edit the encoder, or call the model without a cache",
            )
        keep = keep | ((where.behind >= 0) & (where.behind < last))
    if token is not None:
        assert sequence is not None
        if token not in sequence.tokens:
            sequence.tokens |= {token}
        if isinstance(where.ids, str):
            raise unknown(f"the ids of the tokens are unknown: {where.ids}", "leave out `token`, or pass `input_ids`")
        keep = keep | (where.ids.since(token) & (where.ahead >= 0))
    return keep.unsqueeze(-1)


def unknown(message: str, help: str | None = None) -> PeftcError:
    return PeftcError(Diagnostic("P423", message, help=help))
