"""Copies of live objects whose tensors are fake: same structure, shapes and dtypes, no data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


class _CopyAsFake(TorchFunctionMode):
    """Answers `Tensor.__deepcopy__` with a fake tensor, so that `copy.deepcopy` copies structure only."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__deepcopy__":
            tensor, memo = args
            memo[id(tensor)] = fake = as_fake(tensor, self.mode)
            return fake
        return func(*args, **(kwargs or {}))


def as_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor (or parameter) of the same shape, dtype, device and `requires_grad`."""
    if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode:
        return tensor
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(value: T, mode: FakeTensorMode) -> T:
    """A deep copy of modules, caches or arguments in which every tensor is fake. Nothing of the original is touched.

    Tensors that are shared stay shared.
    """
    memo: dict[int, Any] = {}
    if isinstance(value, torch.nn.Module):  # nn.Parameter copies itself without asking the function mode
        memo = {id(p): as_fake(p, mode) for p in value.parameters()}
    with _CopyAsFake(mode):
        return copy.deepcopy(value, memo)
