"""Building a case, and running it in train, eval and no_grad."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.forward import main_output
from benchmarks.foreign_models.case import Case

MODES = ("eval", "no_grad", "train")
SEED = 3


def fresh(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The case's model: the same weights at every call, none of them all equal (gates and norms are
    often zero or one at first, which would hide what an edit does).
    """
    torch.manual_seed(SEED)
    random.seed(SEED)  # hyper connections choose a stream by it
    model = case.build()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.is_floating_point()
                and parameter.numel()
                and bool((parameter == parameter.flatten()[0]).all())
            ):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    model.to(dtype)
    model.eval()
    with torch.no_grad():
        model(**inputs_of(case, dtype))  # weights of the old weight_norm are computed by a forward
    return model


def _is_constant(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and bool((parameter == parameter.flatten()[0]).all())


def inputs_of(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(SEED)
    return {name: _cast(value, dtype) for name, value in case.inputs().items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return type(value)({key: _cast(one, dtype) for key, one in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(one, dtype) for one in value)
    return value


def run(case: Case, model: nn.Module, inputs: Mapping[str, Any], mode: str, seed: int = 0) -> Tensor:
    """The output in a mode. A model in training is changed by a forward (running means)."""
    model.train(mode == "train")
    torch.manual_seed(seed)
    with torch.set_grad_enabled(mode != "no_grad"):
        out = model(**inputs)
    model.eval()
    return case.output(out) if case.output else main_output(out)


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value (1 at least)."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel():
        return 0.0
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / max(1.0, float(other.abs().max())))
