"""Which modules PEFT changes by a configuration alone."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from peftc.exchange.peft_format.config import PeftConfig, matches, refusal


def is_target(config: PeftConfig, name: str, module: nn.Module, model: nn.Module) -> bool:
    excluded, wanted = config.values.get("exclude_modules"), config.values.get("target_modules")
    if not name or (excluded and is_named(excluded, name, "exclude_modules")):
        return False
    if wanted == "all-linear":
        output = getattr(model, "get_output_embeddings", lambda: None)()
        return isinstance(module, nn.Linear | Conv1D) and module is not output
    return bool(wanted) and is_named(wanted, name, "target_modules")


def is_named(value: Any, name: str, key: str) -> bool:
    """PEFT takes a text for a regular expression, and names of a list for ends of names."""
    if isinstance(value, str):
        return matches(key, value, name)
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in cast(list[Any], value)):
        raise refusal(key, value, "it is an array of names, or a regular expression")
    return any(name == end or name.endswith(f".{end}") for end in cast(list[str], value))
