"""Tensors in what modules take and return, and how much two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftc.forms.module import seeded

TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 2e-2,
}  # of the largest value
GRADIENT = 20.0  # times the tolerance of a value: sums over more terms


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a result with their names; caches are not entered."""
    if isinstance(value, Tensor):
        yield path or "result", value
    elif isinstance(value, Mapping):
        for name, part in value.items():  # pyright: ignore[reportUnknownVariableType]
            yield from leaves(part, f"{path}.{name}".lstrip("."))
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            yield from leaves(part, f"{path}[{i}]")


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor of arguments, or of a result."""
    return next((tensor for _, tensor in leaves(value)), None)


def with_first(value: Any, new: Tensor | None) -> Any:
    """The same value with another first tensor. Containers are copied."""
    replaced, _ = _with_first(value, new)
    return replaced


def _with_first(value: Any, new: Tensor | None) -> tuple[Any, bool]:
    if isinstance(value, Tensor):
        return new, True
    if isinstance(value, Mapping):
        for name, part in value.items():  # pyright: ignore[reportUnknownVariableType]
            made, done = _with_first(part, new)
            if done:
                changed: Any = copy(value)  # pyright: ignore[reportUnknownArgumentType]
                changed[name] = made
                return changed, True
    elif isinstance(value, tuple | list):
        for i, part in enumerate(value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            made, done = _with_first(part, new)
            if done:
                parts = list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                parts[i] = made
                return (parts if isinstance(value, list) else tuple(parts)), True
    return value, False


@dataclass(frozen=True)
class Difference:
    """`size`: the largest absolute difference of the tensor called `name`; `scale`: its largest value; `bound`: what is allowed."""

    name: str
    size: float
    scale: float
    bound: float

    def __str__(self) -> str:
        return f"`{self.name}` differs by {self.size:.3g} where the largest value is {self.scale:.3g}"


def difference(want: Mapping[str, Tensor], got: Mapping[str, Tensor], factor: float = 1.0) -> Difference | None:
    """The first tensor that differs by more than its dtype allows.

    Args: `factor`: times the tolerance of the dtype; 0 for equal bits.
    """
    for name, first in want.items():
        second = got.get(name)
        if second is None or second.shape != first.shape:
            return Difference(name, float("inf"), 0.0, 0.0)
        if not first.is_floating_point() or not factor:
            if not torch.equal(first.nan_to_num(), second.nan_to_num()):
                return Difference(name, apart(first, second), largest(first), 0.0)
            continue
        scale = largest(first)
        bound = factor * TOLERANCE.get(first.dtype, 1e-4) * max(scale, 1e-6)
        if (size := apart(first, second)) > bound or size != size:
            return Difference(name, size, scale, bound)
    return None


def apart(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference; entries that are not finite in both are left out."""
    a, b = first.detach().double(), second.detach().double()
    where = a.isfinite() | b.isfinite()
    return (a - b)[where].abs().max().item() if bool(where.any()) else 0.0


def largest(value: Tensor) -> float:
    finite = value.detach().double()
    finite = finite[finite.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def floating(value: Any) -> dict[str, Tensor]:
    """The floating tensors of a result, by name."""
    return {name: tensor for name, tensor in leaves(value) if tensor.is_floating_point()}


def results(value: Any) -> dict[str, Tensor]:
    """The floating tensors that a call returns, but its cache."""
    return {name: tensor for name, tensor in floating(value).items() if not name.startswith("past_key_values")}


def weighed(outputs: Mapping[str, Tensor]) -> Tensor | None:
    """A fixed linear function of all results, or None where nothing has a gradient."""
    total: Tensor | None = None
    for name, value in outputs.items():
        if value.requires_grad:
            weights = torch.randn(value.shape, generator=seeded(name)).to(value.device, value.dtype)
            part = torch.where(value.isfinite(), value * weights, 0.0).sum() / max(1, value.numel()) ** 0.5
            total = part if total is None else total + part
    return total
