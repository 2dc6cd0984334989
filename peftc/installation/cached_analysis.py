"""Analyses are cached: that of a compiled model as long as the model does not change, and those of
the latest models in this process for others of the same structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from peftc.concurrency.context import CHOICE
from peftc.models.samples import is_same_sample
from peftc.models.sources import ModelSource
from peftc.modules.memory import storage_id
from peftc.recognition.analysis import Analysis, analyse
from peftc.rewriting.edits import CONTAINER, SHARED
from peftc.tracing.bytecode import reachable_code

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
TORCH = frozenset(vars(nn.Module()))  # what torch keeps in every module
PEFTC = frozenset({"_peftc", CHOICE, "peftc_originals", "peftc_completeness"})


MOST = 8  # analyses of other models that are kept

_recent: list[tuple[object, tuple[Any, ...], Analysis]] = []  # the latest is last; a state has no hash


class NotComparable(Exception):
    """A model has an attribute whose changes cannot be seen."""


@dataclass(frozen=True, eq=False)
class CachedAnalysis:
    """`state` is that of the compiled model. If it has changed, the analysis may be wrong."""

    analysis: Analysis
    sample: Mapping[str, Any] | None
    state: tuple[Any, ...] | None

    @classmethod
    def of(cls, model: nn.Module, analysis: Analysis, sample: Mapping[str, Any] | None) -> CachedAnalysis:
        return cls(analysis, sample, state_of(model))

    def is_valid(self, model: nn.Module, sample: Mapping[str, Any] | None) -> bool:
        return self.state is not None and is_same_sample(sample, self.sample) and state_of(model) == self.state


def shared_analysis(source: ModelSource, sample: Mapping[str, Any] | None = None) -> Analysis:
    """The analysis of a model, or of an earlier one in this process with an equal state."""
    state = state_of(source.module) if MOST and source.module is not None and sample is None else None
    if state is None:
        return analyse(source, sample)
    key = (source.id, source.kind, source.type, source.folder)
    entry = next((entry for entry in _recent if entry[:2] == (key, state)), None)
    if entry is None:
        entry = (key, state, analyse(source, sample))
    _recent[:] = [*(other for other in _recent if other is not entry), entry][-MOST:]
    return entry[2]


def state_of(model: nn.Module) -> tuple[Any, ...] | None:
    """All that an analysis depends on: classes, code, attributes, layouts; None if unknown."""
    try:
        return _state(model)
    except NotComparable:
        return None


def _state(model: nn.Module) -> tuple[Any, ...]:
    numbers: dict[int, int] = {}  # of objects that several modules share
    memories: dict[int, int] = {}

    def number(thing: object) -> int:
        return numbers.setdefault(id(thing), len(numbers))

    config, code_of = getattr(model, "config", None), cache(reachable_code)
    state: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), comparable(config)]
    for name, module in model.named_modules(remove_duplicate=False):
        if CONTAINER in (parts := name.split(".")) or parts[0] == SHARED:
            continue
        own = vars(module)
        if any(own[key] for key in TORCH if key.endswith(("_hooks", "_called"))):
            raise NotComparable
        attributes = [(key, value) for key, value in own.items() if key not in TORCH and key not in PEFTC]
        generated = getattr(type(module), "_peftc_kind", None)
        state += [name, number(module), type(module), code_of(type(module) if generated is None else generated.base)]
        state += [(key, number(value) if value is config else comparable(value)) for key, value in attributes]
        for key, tensor in [*own["_parameters"].items(), *own["_buffers"].items()]:
            if tensor is None:
                state.append((key, None))
            elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                raise NotComparable
            else:
                memory = memories.setdefault(storage_id(tensor), len(memories))
                layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
                state.append((key, number(tensor), memory, layout, tensor.requires_grad))
    return tuple(state)


def comparable(value: Any) -> Any:
    """A value that is equal exactly where an attribute is the same. Raises: NotComparable."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, PretrainedConfig):
        return type(value), value.to_json_string(use_diff=False), getattr(value, "_attn_implementation", None)
    if isinstance(value, GenerationConfig):
        return type(value), str(value)
    if isinstance(value, tuple | list):
        return type(value), *map(comparable, value)
    if isinstance(value, dict):
        return type(value), *((comparable(k), comparable(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(comparable, value))
    library = str(getattr(value, "__module__", "")).startswith(("torch", "transformers"))
    if library and callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return value  # one of its functions
    raise NotComparable
