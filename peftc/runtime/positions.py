"""The positions of a call's tokens, for forms that act at the first or last ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peftc.forms.module import has_values
from peftc.forms.sequence_module import Sequence, Where, unknown
from peftc.runtime.call_arguments import UnknownCache, cache_of, mask_format, past_of, starts_of, tokens_of


def forward_with_positions(base: type[nn.Module], module: Any, named: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The forward of `base`; until it returns, the module's forms know the positions of its tokens.

    Raises: P423 where they are unknown.
    """
    arguments = {**named, **rest}
    sequence: Sequence = module.peftc.sequence
    if getattr(module, "_is_replica", False):
        raise unknown(
            "replicas in threads share one record of the positions of a call's tokens", "use DistributedDataParallel"
        )
    before, sequence.present = sequence.present, positions_of(arguments)
    try:
        return base.forward(module, **arguments)
    finally:
        sequence.present = before


def positions_of(arguments: dict[str, Any]) -> Where | None:
    """The columns of a call's tokens, counted from the first and the last visible token of their
    rows.

    Without a mask no token is padding.
    Returns: None for a call without tokens.
    Raises: P423 for masks, caches and position ids that leave the positions unknown.
    """
    tokens = tokens_of(arguments)
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    count, cache, mask = tokens.shape[1], cache_of(arguments), arguments.get("attention_mask")
    past = known_past(arguments)
    columns = torch.arange(count, device=tokens.device)[None] + past
    if mask is None:
        check_one_sequence_per_row(arguments.get("position_ids"))
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


def check_one_sequence_per_row(position_ids: Any) -> None:
    """Raises: P423 for the position ids of packed sequences."""
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return
    if not has_values(position_ids) or torch.compiler.is_compiling():
        return
    if bool((position_ids.diff(dim=1) != 1).any()):
        raise unknown("the position ids are not those of one sequence a row", "pass an attention mask (batch, tokens)")
