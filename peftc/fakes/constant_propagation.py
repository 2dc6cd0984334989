"""Values of small tensors that do not depend on weights or activations: grids of patches, lengths, masks made of them.

A fake tensor has no data, but where all that it is computed from is known, so is it. What is known is kept beside the fake
tensor, and computed again with every operation on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.utils._pytree import tree_flatten, tree_map

LARGEST = 1 << 20  # elements of a tensor that is followed
_KEY = "peftc_known"


def known(value: Any) -> Any:
    """The data of a tensor, or None where it is not known. A tensor that is not fake knows itself."""
    if not isinstance(value, torch.Tensor):
        return None
    if not isinstance(value, FakeTensor):
        return value if value.numel() <= LARGEST and not value.is_meta else None
    return vars(value).get(_KEY)


def with_data(data: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor that is known to hold `data`."""
    made = mode.from_tensor(data)
    vars(made)[_KEY] = data
    return made


class Known:
    """What is known during one forward."""

    def __init__(self) -> None:
        self.spoilt: list[torch.Tensor] = []  # written to with what is not known; kept, so that no memory is used again

    def of(self, value: Any) -> Any:
        """The data of one argument; None where it is not known."""
        data = known(value)
        if data is not None and any(_shares(data, gone) for gone in self.spoilt):
            return None
        return data

    def all(self, args: Any) -> bool:
        """Whether all tensors among the arguments are known."""
        return all(self.of(t) is not None for t in tensors(args))

    def real(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The operation on data, on the processor that holds it."""
        given = {name: torch.device("cpu") if name == "device" and v is not None else v for name, v in kwargs.items()}
        with _disable_current_modes(), torch.no_grad():
            return func(*tree_map(self._data, args), **tree_map(self._data, given))

    def _data(self, value: Any) -> Any:
        return self.of(value) if isinstance(value, torch.Tensor) else value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keeps what an operation that was done on fake tensors makes known, or spoils."""
        if any(isinstance(a, FakeTensor) and _KEY not in vars(a) for a in args) and not func._schema.is_mutable:
            return  # as nearly always
        made = list(tensors(out))
        if not made or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
            return
        if not self.all((args, kwargs)):
            if func._schema.is_mutable:
                self.spoilt += [self.of(t) for t in tensors(args) if self.of(t) is not None]
            return
        if any(t.numel() > LARGEST or not isinstance(t, FakeTensor) for t in made):
            return
        data = list(tensors(self.real(func, args, kwargs)))
        if len(data) == len(made):
            for fake, value in zip(made, data, strict=True):
                vars(fake)[_KEY] = value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested arguments or results."""
    flat: list[Any] = tree_flatten(value)[0]
    return (v for v in flat if isinstance(v, torch.Tensor))


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
