"""Weights that a module computes from other parameters, and what these must be for a new weight.

A parametrisation says so by its right inverse: of weight norm, W = g v / |v|, it is g = |W| and
v = W. Where it has none, or one that gives another weight (spectral norm), nothing can be folded.

Source: `torch.nn.utils.parametrize`; the hook of `torch.nn.utils.weight_norm` is older.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.weight_norm import WeightNorm

from peftc.folding.own_forward import is_close


def is_computed(module: nn.Module, attribute: str) -> bool:
    """Whether a parametrisation, or the hook of weight norm, computes a tensor of a module."""
    return is_parametrized(module, attribute) or _hook(module, attribute) is not None


def stored_values(module: nn.Module, attribute: str, value: Tensor) -> Mapping[str, Tensor] | None:
    """The parameters of a module, by name, from which it computes `value`; None without such."""
    compute, values = _by_hook(module, attribute, value)
    if is_parametrized(module, attribute):
        compute, values = _by_parametrisation(module, attribute, value)
    own = dict(module.named_parameters())
    if not values or any(name not in own or own[name].shape != new.shape for name, new in values.items()):
        return None
    rounded = {name: new.to(own[name].dtype) for name, new in values.items()}
    return rounded if is_close(compute(*rounded.values()), value) else None


def _hook(module: nn.Module, attribute: str) -> WeightNorm | None:
    hooks = cast(Iterator[Any], iter(vars(module)["_forward_pre_hooks"].values()))
    return next((hook for hook in hooks if isinstance(hook, WeightNorm) and hook.name == attribute), None)


def _by_hook(module: nn.Module, attribute: str, value: Tensor) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    hook = _hook(module, attribute)
    dim = 0 if hook is None else hook.dim
    scale = torch.norm_except_dim(value, 2, dim)
    values = {f"{attribute}_g": scale, f"{attribute}_v": value}
    return lambda g, v: v * (g / torch.norm_except_dim(v, 2, dim)), values


def _by_parametrisation(
    module: nn.Module, attribute: str, value: Tensor
) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    steps = copy.deepcopy(cast(Any, module.parametrizations)[attribute]).eval()  # some keep what they compute

    def compute(*originals: Tensor) -> Tensor:
        first, *others = steps
        result = first(*originals)
        for step in others:
            result = step(result)
        return result

    original: Any = value
    for step in reversed(steps):
        if not hasattr(step, "right_inverse"):
            return compute, {}
        original = step.right_inverse(original)
    prefix = f"parametrizations.{attribute}.original"
    if isinstance(original, Tensor):
        return compute, {prefix: original}
    return compute, {f"{prefix}{i}": one for i, one in enumerate(original)}
