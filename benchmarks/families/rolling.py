"""Cached against uncached decoding with `generate`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.families.shrink import LAST_FREE

NEW_TOKENS = 3


def cache_difference(model: nn.Module, inputs: Mapping[str, Any]) -> float | str:
    """The largest relative difference of the logits, or why there is none."""
    if not getattr(model, "can_generate", lambda: False)():
        return "does not generate"
    try:
        with_cache = _logits(model, inputs, True)
        without = _logits(model, inputs, False)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:120]}"
    return max(_relative(a, b) for a, b in zip(with_cache, without, strict=True))


def described(worst: float | str, tolerance: float) -> str:
    """`equal`, the difference, or why there is none."""
    return worst if isinstance(worst, str) else "equal" if worst < tolerance else f"differs by {worst:.1e}"


@torch.no_grad()
def _logits(model: nn.Module, inputs: Mapping[str, Any], cache: bool) -> list[torch.Tensor]:
    kwargs = {k: v for k, v in inputs.items() if k not in ("decoder_input_ids", "use_cache")}
    kwargs = copy.deepcopy(kwargs)  # a `generate` may write into its inputs
    settings = copy.deepcopy(model.generation_config)
    settings.update(
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        max_length=None,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        use_cache=cache,
        suppress_tokens=_special(model),
        output_logits=True,
        return_dict_in_generate=True,
        **_forced,
    )
    torch.manual_seed(0)
    out = model.generate(**kwargs, generation_config=settings)
    return list(out.logits)


def _special(model: nn.Module) -> list[int] | None:
    """A random model may generate an image token and then require its image."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 0
    return list(range(LAST_FREE, vocabulary)) or None


_forced = dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size"))


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    finite = torch.isfinite(one) & torch.isfinite(other)
    one, other = one[finite], other[finite]
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))
