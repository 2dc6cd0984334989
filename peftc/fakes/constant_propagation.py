"""Follows small values that do not depend on weights or activations, such as grids of patches.

A fake tensor has no data. If all its operands are constants, so is the result: its data is kept
beside the fake tensor, and each operation on fake tensors is repeated on the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.utils._pytree import tree_map

from peftc.fakes.tensors import tensors_in

LARGEST = 1 << 20  # elements of a constant
_KEY = "peftc_constant"


def constant_of(value: Any) -> Any:
    """The data of a constant tensor, or None. A tensor that is not fake is its own constant."""
    if not isinstance(value, torch.Tensor):
        return None
    if not isinstance(value, FakeTensor):
        return value if value.numel() <= LARGEST and not value.is_meta else None
    return vars(value).get(_KEY)


def fake_constant(data: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    fake = mode.from_tensor(data)
    vars(fake)[_KEY] = data
    return fake


class ConstantPropagation:
    """The constants of one forward."""

    def __init__(self) -> None:
        # Something unknown was written into them. Kept, so that no other tensor gets their memory.
        self.overwritten: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        data = constant_of(value)
        if data is None or memory_id(data) in map(memory_id, self.overwritten):
            return None
        return data

    def all(self, args: Any) -> bool:
        return all(self.of(t) is not None for t in tensors_in(args))

    def compute(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The operation on the data of constants, on the CPU."""
        kwargs = {name: torch.device("cpu") if name == "device" and v is not None else v for name, v in kwargs.items()}
        args, kwargs = tree_map(lambda v: self.of(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        with _disable_current_modes(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keeps the data of an operation's results, or notes which constants it overwrites."""
        if any(isinstance(a, FakeTensor) and _KEY not in vars(a) for a in args) and not func._schema.is_mutable:
            return  # the quick way out for nearly every operation
        results = list(tensors_in(out))
        if not results or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return
        if not self.all((args, kwargs)):
            if func._schema.is_mutable:
                self.overwritten += [data for t in tensors_in(args) if (data := self.of(t)) is not None]
            return
        if any(t.numel() > LARGEST or not isinstance(t, FakeTensor) for t in results):
            return
        data = list(tensors_in(self.compute(func, args, kwargs)))
        if len(data) == len(results):
            for fake, value in zip(results, data, strict=True):
                vars(fake)[_KEY] = value


def memory_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
