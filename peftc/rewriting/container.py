"""The module in which a region's form modules are registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

CONTAINER = "peftc"  # the container's name in its region
SHARED = "peftc_shared"  # the name, at the model's root, of the modules that several sites share


class Container(nn.Module):
    """Holds modules by name, and as plain attributes, which Python finds five times as fast."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        vars(self)[name] = module

    def __delattr__(self, name: str) -> None:
        if name in self._modules:
            vars(self).pop(name, None)
        super().__delattr__(name)


def own_children(sequence: Any) -> Iterator[nn.Module]:
    """The children that an edited `nn.Sequential` runs: all but the container."""
    return (module for name, module in sequence._modules.items() if name != CONTAINER)


def own_length(sequence: Any) -> int:
    return sum(1 for _ in own_children(sequence))
