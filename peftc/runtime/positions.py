"""The positions of a call's tokens, for forms that act at the first or last ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peftc.forms.module import has_values
from peftc.forms.sequence_module import Sequence, Where, unknown
from peftc.runtime.call_arguments import UnknownCache, cache_of, mask_format, past_of, starts_of, tokens_of


def forward_with_positions(base: type[nn.Module], module: Any, named: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The forward of `base`; meanwhile forms know the positions of its tokens. Raises: P423."""
    arguments = {**named, **rest}
    sequence: Sequence = module.peftc.sequence
    if getattr(module, "_is_replica", False):
        message = "replicas in threads share one record of the positions of a call's tokens"
        raise unknown(message, "use DistributedDataParallel")
    before, sequence.present = sequence.present, positions_of(arguments)
    try:
        return base.forward(module, **arguments)
    finally:
        sequence.present = before


def positions_of(arguments: dict[str, Any]) -> Where | None:
    """The columns of a call's tokens, from the first and the last visible token of their rows.

    Returns: None for a call without tokens. Raises: P423 where the positions are unknown.
    """
    tokens = tokens_of(arguments)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    count, cache, mask = tokens.shape[1], cache_of(arguments), arguments.get("attention_mask")
    past = known_past(arguments)
    columns = torch.arange(count, device=tokens.device)[None] + past
    if mask is None:
        ids = arguments.get("position_ids")
        known = isinstance(ids, Tensor) and ids.ndim == 2 and has_values(ids) and not torch.compiler.is_compiling()
        if known and bool((ids.diff(dim=1) != 1).any()):
            message = "the position ids are not those of one sequence a row"
            raise unknown(message, "pass an attention mask (batch, tokens)")
        return Where(columns, None if cache is not None else count - 1 - columns)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        message = f"an attention mask with {mask_format(mask)} does not show which tokens are padding"
        raise unknown(message, "pass it as (batch, tokens)")
    if (cache is None and mask.shape[1] != count) or (isinstance(past, int) and mask.shape[1] < past + count):
        raise unknown(f"the attention mask is for {mask.shape[1]} tokens, and cache and call have {past + count}")
    first = starts_of(mask)
    if cache is not None:
        return Where(columns - first, None)
    return Where(columns - first, count - 1 - starts_of(mask.flip(1)) - columns)


def known_past(arguments: dict[str, Any]) -> Any:
    try:
        past = past_of(arguments)
    except UnknownCache as error:
        raise unknown(str(error)) from error
    if past is None:
        raise unknown("the number of tokens in the recurrent state of this call is unknown", "call without a cache")
    return past
