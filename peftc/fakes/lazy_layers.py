"""Copies of layers without data whose children are copied when something looks at them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)

from peftc.fakes.repeated_layers import RepeatedLayer, repeated_layers
from peftc.fakes.tensors import copy_model, fake_like, new_mode
from peftc.modules.lazy_children import Attributes, Children, LayerPrototype, LazyChildren
from peftc.modules.memory import Memory
from peftc.modules.module_rows import ModuleRows
from peftc.modules.offload import is_dispatched
from peftc.modules.torch_attributes import TABLES
from peftc.modules.walk import has_aliases

Memories = dict[tuple[str, str], tuple[Memory, ...]]


def lazy_copy(model: nn.Module, widen: bool = False, rows: ModuleRows | None = None) -> nn.Module | None:
    """`fake_copy(model, whole=True)`, in which repeated layers have lazy children; None without.

    Nothing else may refer to what is in such a layer. There is no lazy copy where that of another
    part has reached into one or shares memory with it, nor where a module has several names.
    `rows`: those of the model's modules, if they are known; they say quickly what repeats.
    """
    repeats = repeated_layers(model, rows)
    if not repeats.layers or is_dispatched(model, repeats.layers):
        return None
    with _disable_current_modes():
        new, copies = copy_model(model, new_mode(), widen, True, repeats.layers)
        tensors = (copy for copy in copies.values() if isinstance(copy, FakeTensor))
        if has_aliases(new) or not repeats.owners.isdisjoint(copies) or repeats.overlap(tensors):
            return None
        _set_lazy_children(repeats.layers, copies)
    return new


def _set_lazy_children(layers: Mapping[int, RepeatedLayer], copies: Mapping[int, Any]) -> None:
    prototypes: dict[int, LayerPrototype] = {}
    for number, repeat in layers.items():
        template = id(repeat.template)
        if template not in prototypes:
            prototypes[template] = LayerPrototype(_copy(copies[template], "", {}, {}))
        prototype, layer = prototypes[template], copies[number]
        make = partial(_children, prototype.layer, repeat.attributes, repeat.memories)
        vars(layer)["_modules"] = LazyChildren(layer, prototype, repeat.attributes, make)


def _children(prototype: nn.Module, attributes: Attributes, memories: Memories) -> Children:
    # Modes, of which some are active while a model runs, would intercept each tensor that is made.
    with _disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return {name: _copy(child, name, attributes, memories) for name, child in prototype.named_children()}


def _tensor(tensor: FakeTensor | None, memory: tuple[Memory, ...]) -> Any:
    if tensor is None:
        return None
    return fake_like(tensor, tensor.fake_mode, tensor.dtype, tensor.fake_device, memory)


def _copy(module: nn.Module, name: str, attributes: Attributes, memories: Memories) -> Any:
    """A copy of a copy: what both have in common is that of the model, too."""
    new = type(module).__new__(type(module))
    own: dict[str, Any] = vars(new)
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers"):
            own[key] = {n: _tensor(t, memories.get((name, n), ())) for n, t in value.items()}
        elif key == "_modules":
            own[key] = {n: _copy(c, f"{name}.{n}".lstrip("."), attributes, memories) for n, c in value.items()}
        elif key == "_non_persistent_buffers_set":
            own[key] = set(value)
        elif key in TABLES:
            own[key] = TABLES[key]()
        else:
            own[key] = copy.deepcopy(attributes[name, key]) if (name, key) in attributes else value
    return new
