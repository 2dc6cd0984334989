"""The analyses of models that tests build again and again: a second model of the same structure has that of the first.

For tests whose subject is not how a model is read. Where anything in a model is not plain to compare, it is read anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from peftc.models.resolve import ModelSource
from peftc.recognition import analysis

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
OWN = frozenset(vars(nn.Module()))  # what torch keeps in every module
_analyses: dict[Any, analysis.Analysis] = {}


class Unlike(Exception):
    """A model has something that cannot be compared."""


def analyse(model: Any, sample: Mapping[str, Any] | None = None) -> analysis.Analysis:
    try:
        if not isinstance(model, ModelSource) or model.module is None or sample is not None:
            raise Unlike
        if not type(model.module).__module__.startswith("transformers"):
            raise Unlike  # tests have classes of one name
        told = (model.id, model.kind, model.type, model.model_class, model.folder, model.untied_head, model.own_code)
        key = (*told, *structure(model.module))
        hash(key)
    except (Unlike, TypeError):
        return analysis.analyse(model, sample)
    if key not in _analyses:
        _analyses[key] = analysis.analyse(model, sample)
    return replace(_analyses[key], source=model)


def structure(model: nn.Module) -> tuple[Any, ...]:
    """Classes, plain attributes, and tensors without their values; what is shared has one number."""
    numbers: dict[int, int] = {}

    def number(thing: object) -> int:
        return numbers.setdefault(id(thing), len(numbers))

    config = getattr(model, "config", None)
    found: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), comparable(config)]
    memories: dict[int, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found += [name, number(module), type(module)]
        attributes = [(key, value) for key, value in vars(module).items() if key not in OWN]
        found += [(key, number(value) if value is config else comparable(value)) for key, value in attributes]
        if any(vars(module)[key] for key in OWN if key.endswith(("_hooks", "_called"))):
            raise Unlike
        tensors = [*module._parameters.items(), *module._buffers.items()]
        for key, tensor in tensors:
            if tensor is None:
                found.append((key, None))
            elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                raise Unlike
            else:
                memory = memories.setdefault(tensor.untyped_storage()._cdata, len(memories))
                form = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
                found.append((key, number(tensor), memory, form, tensor.requires_grad))
    return tuple(found)


def comparable(value: Any) -> Any:
    """A value that tells whether two attributes are the same."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, PretrainedConfig):
        return type(value), value.to_json_string(use_diff=False), value._attn_implementation
    if isinstance(value, GenerationConfig):
        return type(value), str(value)
    if isinstance(value, (tuple, list)):
        return type(value), *map(comparable, value)
    if isinstance(value, dict):
        return type(value), *((comparable(k), comparable(v)) for k, v in value.items())
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(comparable, value))
    library = str(getattr(value, "__module__", "")).startswith(("torch", "transformers"))
    if library and callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return value  # one of its functions
    raise Unlike
