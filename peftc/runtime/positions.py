"""Telling the forms of a stack where the tokens of a call stand. Generated code calls this; the stack's own code is run as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peftc.forms.module import has_values
from peftc.forms.sequence_module import Sequence, Where, unknown
from peftc.runtime.caches import UnknownCache, cache_of, past_of


def located(base: type[nn.Module], module: Any, arguments: dict[str, Any], rest: dict[str, Any]) -> Any:
    """The forward of `base`, whose forms know the positions of the tokens until it returns.

    Raises: P423 where they cannot be told.
    """
    given = {**arguments, **rest}
    sequence: Sequence = module.peftc.sequence
    if getattr(module, "_is_replica", False):
        raise unknown("replicas in threads share what their forms know of a call", "use DistributedDataParallel")
    before, sequence.present = sequence.present, where(given)
    try:
        return base.forward(module, **given)
    finally:
        sequence.present = before


def where(given: dict[str, Any]) -> Where | None:
    """The places of the tokens of a call: columns of the mask, counted from its first and its last token.

    Without a mask no token is padding. None where the call has no tokens. Raises: P423 for masks and position ids from which
    it cannot be told.
    """
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    count, cache, mask = tokens.shape[1], cache_of(given), given.get("attention_mask")
    past = known_past(given)
    columns = torch.arange(count, device=tokens.device)[None] + past
    if mask is None:
        check_one(given.get("position_ids"))
        return Where(columns, None if cache is not None else count - 1 - columns)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        said = f"{mask.ndim} dimensions" if isinstance(mask, Tensor) else f"the type {type(mask).__name__}"
        raise unknown(
            f"an attention mask with {said} does not tell which tokens are padding", "give it as (batch, tokens)"
        )
    if (cache is None and mask.shape[1] != count) or (isinstance(past, int) and mask.shape[1] < past + count):
        raise unknown(f"the attention mask is for {mask.shape[1]} tokens, and cache and call have {past + count}")
    seen = mask != 0
    first = seen.int().argmax(1, keepdim=True)
    if cache is not None:
        return Where(columns - first, None)
    last = count - 1 - seen.flip(1).int().argmax(1, keepdim=True)
    return Where(columns - first, last - columns)


def known_past(given: dict[str, Any]) -> Any:
    """`past_of`. Raises: P423 for a cache that does not tell how many tokens it has."""
    try:
        past = past_of(given)
    except UnknownCache as cannot:
        raise unknown(str(cannot)) from cannot
    if past is None:
        raise unknown("the call continues a state that does not tell how many tokens it has", "call without a cache")
    return past


def check_one(numbers: Any) -> None:
    """Raises: P423 where position ids begin again, as those of several sequences in one row do."""
    if not isinstance(numbers, Tensor) or numbers.ndim != 2 or not has_values(numbers) or torch.compiler.is_compiling():
        return
    if bool((numbers.diff(dim=1) != 1).any()):
        raise unknown("the position ids are not those of one sequence a row", "give an attention mask (batch, tokens)")
