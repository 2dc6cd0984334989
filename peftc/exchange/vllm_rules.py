"""What vLLM takes of a PEFT adapter: the rules of its `PEFTHelper` and of its names of tensors.

Source: vLLM 0.33, vllm/lora/peft_helper.py, lora_model.py, utils.py, and config/lora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.folder import PREFIX

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that `--max-lora-rank` takes
_HEADS = ("classifier", "score")
_ENDS = ("lora_A.weight", "lora_B.weight")


def vllm_config(
    config: Mapping[str, Any], tensors: Collection[str], max_rank: int | None
) -> tuple[dict[str, Any], str]:
    """The configuration for vLLM, and what to start it with. Raises: P801, P805."""
    if max_rank is not None and max_rank not in RANKS:
        message = f"vLLM takes no `--max-lora-rank {max_rank}`"
        raise PeftcError(Diagnostic("P805", message, help=f"it takes {', '.join(map(str, RANKS))}"))
    rank = max(config["r"], *config["rank_pattern"].values(), 0)
    served = next((one for one in RANKS if one >= rank), None)
    if served is None:
        message = f"the adapter has rank {rank}, and vLLM takes at most {RANKS[-1]}"
        raise PeftcError(Diagnostic("P805", message, help="`max_rank=` with `svd=True` (`--svd`) writes a lower one"))
    if parameters := config.get("target_parameters"):
        raise _no_form(f"it takes LoRA of Linears, and `{parameters[0]}` is a parameter of several experts")
    for name in tensors:
        _check_name(name)
    for module in config.get("modules_to_save") or ():
        if module not in _HEADS:
            raise _no_form(f"it loads no whole modules but `classifier` and `score`, and `{module}` is trained")
    return dict(config), f"start vLLM with --enable-lora --max-lora-rank {served}"


def _check_name(name: str) -> None:
    """As `parse_fine_tuned_lora_name` reads names: a module, then A or B; or a head.

    Raises: P801.
    """
    if not name.endswith(_ENDS):
        parts = name.split(".")
        if len(parts) < 2 or parts[-1] not in ("weight", "bias") or parts[-2] not in _HEADS:
            raise _no_form(f"it has no name for `{name.removeprefix(PREFIX)}`: it takes LoRA of Linears")


def _no_form(reason: str) -> PeftcError:
    return PeftcError(Diagnostic("P801", f"the adapter has no form in vLLM: {reason}"))
