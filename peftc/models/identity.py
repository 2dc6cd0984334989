"""What identifies a base model: type, configuration, parameter names and shapes, ties."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from peftc.models.settings import settings
from peftc.modules.memory import distinct_entries, memory_of, overlapping, overlaps_itself
from peftc.modules.walk import (
    all_named_buffers,
    all_named_modules,
    all_named_parameters,
    named_modules,
    named_parameters,
)

VERSION = 2  # of fingerprints; version 1 covers `_FACTS` instead of the whole configuration
_FACTS = (  # change what the model computes, and show in no shape
    "num_attention_heads",
    "num_key_value_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "feed_forward_proj",
)


def any_name(name: str) -> bool:
    return True


def parameter_count(model: nn.Module, keep: Callable[[str], bool] = any_name) -> int:
    """The number of scalars; shared memory counts once. `keep` chooses by dotted name."""
    parameters = [p for name, p in named_parameters(named_modules(model)) if keep(name)]
    groups = overlapping(parameters)
    shared = {i for group in groups for i in group}
    alone = sum(p.numel() for i, p in enumerate(parameters) if i not in shared)
    return alone + sum(distinct_entries([parameters[i] for i in group]) for group in groups)


def tied_groups(model: nn.Module, keep: Callable[[str], bool] = any_name) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names that are one tensor, or several over the same memory."""
    groups: dict[object, list[str]] = {}
    for name, parameter in all_named_parameters(all_named_modules(model)):
        if keep(name):
            groups.setdefault(memory_of(parameter) or id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def overlaps(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names whose parameters share memory, also with buffers, or overlap themselves."""
    names: dict[int, list[str]] = {}
    tensors: list[torch.Tensor] = []
    modules = all_named_modules(model)
    for name, tensor in (*all_named_parameters(modules), *all_named_buffers(modules)):
        if id(tensor) not in names:
            tensors.append(tensor)
        names.setdefault(id(tensor), []).append(name)
    several = tuple(
        tuple(name for tensor in group for name in names[id(tensor)])
        for group in ([tensors[i] for i in group] for group in overlapping(tensors))
        if any(isinstance(tensor, nn.Parameter) for tensor in group)
    )
    return (*several, *((names[id(t)][0],) for t in tensors if isinstance(t, nn.Parameter) and overlaps_itself(t)))


def identity(model: nn.Module, keep: Callable[[str], bool] = any_name, version: int = VERSION) -> dict[str, Any]:
    """What tells a base model from others, as JSON values. Version 1 has no `configuration`."""
    config, parameters = getattr(model, "config", None), all_named_parameters(all_named_modules(model))
    values: dict[str, Any] = {
        "type": getattr(config, "model_type", None) or type(model).__name__,
        "facts": {name: value for name in _FACTS if isinstance(value := _config_value(config, name), (int, str))},
        "parameters": {n: list(p.shape) for n, p in parameters if keep(n)},
        "tied": tied_groups(model, keep),
    }
    return values if version == 1 else values | {"configuration": settings(model)}


def _config_value(config: object, name: str) -> object:
    try:
        return getattr(config, name, None)
    except Exception:  # a configuration may refuse a value that differs between layers
        return None


def fingerprint(model: nn.Module, keep: Callable[[str], bool] = any_name) -> str:
    """sha256 over the model's identity, version 2.

    It is the same for a skeleton and the loaded model, for every dtype and device, before and
    after training. It tells architectures and sizes apart, not weights. `keep` chooses parameters
    by dotted name: leave out those that an edit added.
    """
    return fingerprint_of(identity(model, keep))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
