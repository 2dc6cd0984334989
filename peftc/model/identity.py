"""What identifies a base model: its type, its parameters' names and shapes, and what is tied. Never the values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

# Facts of a configuration that change what the model computes and leave no trace in any shape.
_FACTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "feed_forward_proj",
)


def everything(name: str) -> bool:
    """Keeps every parameter."""
    return True


def parameters(model: nn.Module, keep: Callable[[str], bool] = everything) -> int:
    """The number of parameters (scalars), tied weights counted once. `keep` chooses by dotted name."""
    return sum(p.numel() for name, p in model.named_parameters() if keep(name))


def tied_groups(model: nn.Module, keep: Callable[[str], bool] = everything) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names that are one tensor, each in model order."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if keep(name):
            groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def identity(model: nn.Module, keep: Callable[[str], bool] = everything) -> dict[str, Any]:
    """What tells a base from others: its type, the few facts that no shape shows, names and shapes, and ties."""
    config = getattr(model, "config", None)
    return {
        "type": getattr(config, "model_type", None) or type(model).__name__,
        "facts": {name: value for name in _FACTS if isinstance(value := fact(config, name), (int, str))},
        "parameters": {n: list(p.shape) for n, p in model.named_parameters(remove_duplicate=False) if keep(n)},
        "tied": tied_groups(model, keep),
    }


def fact(config: object, name: str) -> object:
    """A value of a configuration; None where it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # whatever a configuration raises that is another one for each of its layers
        return None


def fingerprint(model: nn.Module, keep: Callable[[str], bool] = everything) -> str:
    """sha256 over the model's identity.

    The same for a skeleton and the loaded model, for every dtype and device, before and after training. It tells a base of
    another architecture or size, not other weights of the same one. `keep` chooses parameters by dotted name: leave out
    what an edit has added.
    """
    return fingerprint_of(identity(model, keep))


def fingerprint_of(found: Mapping[str, Any]) -> str:
    """sha256 over an identity."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
