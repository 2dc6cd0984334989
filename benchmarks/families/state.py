"""Everything of a model that an edit could leave changed: classes, attributes of modules, tensors,
and `requires_grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class State:
    classes: dict[str, type]
    tensors: dict[str, torch.Tensor]
    trained: dict[str, bool]
    attributes: dict[str, frozenset[str]]


def state_of(model: nn.Module) -> State:
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
    return State(
        {name: type(module) for name, module in modules.items()},
        {name: tensor.detach().clone() for name, tensor in tensors.items()},
        {name: p.requires_grad for name, p in parameters.items()},
        {name: frozenset(vars(module)) for name, module in modules.items()},
    )


def difference(before: State, after: State) -> str:
    """The first difference in a few words; empty if there is none."""
    if names := _keys(before.classes, after.classes):
        return f"classes of {names}"
    if set(before.tensors) != set(after.tensors):
        return f"tensors {sorted(set(before.tensors) ^ set(after.tensors))[:3]}"
    if names := _keys(before.trained, after.trained):
        return f"requires_grad of {names}"
    if names := [n for n, t in before.tensors.items() if not _equal(t, after.tensors[n])]:
        return f"values of {names[:3]}"
    if names := _keys(before.attributes, after.attributes):
        return f"attributes of {names}"
    return ""


def _keys(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return [n for n in sorted({*one, *other}) if one.get(n) != other.get(n)][:3]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
