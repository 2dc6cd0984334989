"""What identifies a base model: type, configuration, parameter names and shapes, ties."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from peftc.models.settings import settings
from peftc.modules.lazy_children import lazy_children
from peftc.modules.memory import distinct_entries, memory_of, overlapping, overlaps_itself
from peftc.modules.offload import offloaded_ties
from peftc.modules.packed import packed_shapes
from peftc.modules.walk import (
    Named,
    all_named_buffers,
    all_named_modules,
    all_named_parameters,
    modules_outside,
    outline,
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


NamedParameters = Sequence[tuple[str, nn.Parameter]]
Ties = tuple[tuple[str, ...], ...]


def any_name(name: str) -> bool:
    return True


def parameters_of(model: nn.Module, keep: Callable[[str], bool] = any_name) -> NamedParameters:
    """All parameters, those of several names with each. `keep` chooses by dotted name."""
    return [(name, p) for name, p in all_named_parameters(all_named_modules(model)) if keep(name)]


# `parameters`: those that `keep` chooses, where the caller has them already


def parameter_count(
    model: nn.Module, keep: Callable[[str], bool] = any_name, parameters: NamedParameters | None = None
) -> int:
    """The number of scalars; shared memory counts once, a packed weight as what it stands for."""
    packed, ties = (packed_shapes(model.modules()), offloaded_ties(model)) if parameters is None else ({}, {})
    parameters = parameters_of(model, keep) if parameters is None else parameters
    own = list({ties.get(name) or id(parameter): parameter for name, parameter in parameters}.values())
    groups = overlapping(own)
    shared = {i for group in groups for i in group}
    alone = sum(prod(packed.get(id(p), p.shape)) for i, p in enumerate(own) if i not in shared)
    return alone + sum(distinct_entries([own[i] for i in group]) for group in groups)


def tied_groups(
    model: nn.Module, keep: Callable[[str], bool] = any_name, parameters: NamedParameters | None = None
) -> Ties:
    """Groups of dotted names that are one tensor, or several over the same memory."""
    ties = offloaded_ties(model) if parameters is None else {}
    parameters = parameters_of(model, keep) if parameters is None else parameters
    groups: dict[object, list[str]] = {}
    for name, parameter in parameters:
        groups.setdefault(ties.get(name) or memory_of(parameter) or id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def overlaps(model: nn.Module, modules: Named | None = None) -> Ties:
    """Groups of names whose parameters share memory, also with buffers, or overlap themselves.
    `modules`: those to look at, under all their names.
    """
    modules = all_named_modules(model) if modules is None else modules
    parameters = [*all_named_parameters(modules)]
    names: dict[int, list[str]] = {}
    tensors: list[torch.Tensor] = []
    for name, tensor in (*parameters, *all_named_buffers(modules)):
        if id(tensor) not in names:
            tensors.append(tensor)
        names.setdefault(id(tensor), []).append(name)
    several = tuple(
        tuple(name for tensor in group for name in names[id(tensor)])
        for group in ([tensors[i] for i in group] for group in overlapping(tensors))
        if any(isinstance(tensor, nn.Parameter) for tensor in group)
    )
    own: dict[int, str] = {}
    for name, parameter in parameters:
        if overlaps_itself(parameter):
            own.setdefault(id(parameter), name)
    return (*several, *((name,) for name in own.values()))


def identity(
    model: nn.Module,
    keep: Callable[[str], bool] = any_name,
    version: int = VERSION,
    parameters: NamedParameters | None = None,
    tied: Ties | None = None,
) -> dict[str, Any]:
    """What tells a base model from others, as JSON values. Version 1 has no `configuration`.

    A packed weight has the shape of the matrix that it stands for.
    """
    packed = packed_shapes(model.modules()) if parameters is None else {}
    tied = tied_groups(model, keep, parameters) if tied is None else tied
    parameters = parameters_of(model, keep) if parameters is None else parameters
    config = getattr(model, "config", None)
    values: dict[str, Any] = {
        "type": getattr(config, "model_type", None) or type(model).__name__,
        "facts": {name: value for name in _FACTS if isinstance(value := _config_value(config, name), (int, str))},
        "parameters": {name: list(packed.get(id(p), p.shape)) for name, p in parameters},
        "tied": tied,
    }
    return values if version == 1 else values | {"configuration": settings(model)}


def _config_value(config: object, name: str) -> object:
    try:
        return getattr(config, name, None)
    except Exception:  # a configuration may refuse a value that differs between layers
        return None


def fingerprint(
    model: nn.Module,
    keep: Callable[[str], bool] = any_name,
    parameters: NamedParameters | None = None,
    tied: Ties | None = None,
) -> str:
    """sha256 over the model's identity, version 2.

    It is the same for a skeleton and the loaded model, for every dtype and device, before and
    after training. It tells architectures and sizes apart, not weights. `keep` chooses parameters
    by dotted name: leave out those that an edit added.
    """
    return fingerprint_of(identity(model, keep, parameters=parameters, tied=tied))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ParameterFacts:
    """What the parameters of a model say of it: count, ties and overlaps, and its fingerprint."""

    count: int
    tied: Ties
    overlaps: Ties
    fingerprint: str

    @classmethod
    def of(cls, model: nn.Module) -> ParameterFacts:
        """Of lazy children, which share no memory, the parameters are not made."""
        modules = modules_outside(model, duplicates=True)
        own = [*all_named_parameters(modules)]
        parameters = [*all_named_parameters(outline(model, duplicates=True))]
        lazy = sum(children.prototype.size for _, module in modules if (children := lazy_children(module)) is not None)
        tied = tied_groups(model, parameters=own)
        count = parameter_count(model, parameters=own) + lazy
        return cls(count, tied, overlaps(model, modules), fingerprint(model, parameters=parameters, tied=tied))
