"""What identifies a base model: its type, its configuration, its parameters' names and shapes, and what is tied. Never the values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from peftc.models.settings import settings
from peftc.modules.memory import distinct, memory_of, overlapping, repeats

VERSION = 2  # of fingerprints; 1 covers a few facts of the configuration in the place of all of it
# Facts of a configuration that change what the model computes and leave no trace in any shape, as version 1 has them.
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


def any_name(name: str) -> bool:
    """Keeps every parameter."""
    return True


def parameter_count(model: nn.Module, keep: Callable[[str], bool] = any_name) -> int:
    """The number of parameters (scalars), those in common counted once. `keep` chooses by dotted name."""
    each = [p for name, p in model.named_parameters() if keep(name)]
    groups = overlapping(each)
    apart = {i for group in groups for i in group}
    return sum(distinct([each[i] for i in group]) for group in groups) + sum(
        p.numel() for i, p in enumerate(each) if i not in apart
    )


def tied_groups(model: nn.Module, keep: Callable[[str], bool] = any_name) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names that are one tensor, as one object or as several over the same memory; each in model order."""
    groups: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if keep(name):
            groups.setdefault(memory_of(parameter) or id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def overlaps(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of dotted names of parameters that are objects of their own and share memory, with each other or with buffers:
    what is written into one of them is written into the others. One that shares memory with itself is a group alone.
    """
    names: dict[int, list[str]] = {}
    tensors: list[torch.Tensor] = []
    parameters, buffers = (f(remove_duplicate=False) for f in (model.named_parameters, model.named_buffers))
    for name, tensor in (*parameters, *buffers):
        if id(tensor) not in names:
            tensors.append(tensor)
        names.setdefault(id(tensor), []).append(name)
    groups = ([tensors[i] for i in group] for group in overlapping(tensors))
    several = tuple(
        tuple(name for tensor in group for name in names[id(tensor)])
        for group in groups
        if any(isinstance(tensor, nn.Parameter) for tensor in group)
    )
    alone = ((names[id(t)][0],) for t in tensors if isinstance(t, nn.Parameter) and repeats(t))
    return (*several, *alone)


def identity(model: nn.Module, keep: Callable[[str], bool] = any_name, version: int = VERSION) -> dict[str, Any]:
    """What tells a base from others: its type, facts that no shape shows, names and shapes, and ties; from version 2 on all of
    its configuration that has an effect.
    """
    config = getattr(model, "config", None)
    found: dict[str, Any] = {
        "type": getattr(config, "model_type", None) or type(model).__name__,
        "facts": {name: value for name in _FACTS if isinstance(value := fact(config, name), (int, str))},
        "parameters": {n: list(p.shape) for n, p in model.named_parameters(remove_duplicate=False) if keep(n)},
        "tied": tied_groups(model, keep),
    }
    return found if version == 1 else found | {"configuration": settings(model)}


def fact(config: object, name: str) -> object:
    """A value of a configuration; None where it has none, or one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # whatever a configuration raises that is another one for each of its layers
        return None


def fingerprint(model: nn.Module, keep: Callable[[str], bool] = any_name) -> str:
    """sha256 over the model's identity, of version 2.

    The same for a skeleton and the loaded model, for every dtype and device, before and after training. It tells a base of
    another architecture or size, not other weights of the same one. `keep` chooses parameters by dotted name: leave out
    what an edit has added.
    """
    return fingerprint_of(identity(model, keep))


def fingerprint_of(found: Mapping[str, Any]) -> str:
    """sha256 over an identity."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
