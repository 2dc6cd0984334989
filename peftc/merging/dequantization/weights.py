"""Quantised weights of a checkpoint, and how each becomes a dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.merging.checkpoint import Checkpoint


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that several tensors of the checkpoint hold.

    Attributes:
        key: of the dense weight.
        parts: the keys of its tensors, by their names in the format; the first holds the entries.
        make: the dense weight, of the tensors by these names.
    """

    key: str
    parts: Mapping[str, str]
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[dict[str, Tensor]], Tensor]

    @property
    def main(self) -> str:
        return next(iter(self.parts.values()))

    def dense(self, checkpoint: Checkpoint) -> Tensor:
        """Raises: P708 if the tensors do not make the weight that they promise."""
        parts = {name: checkpoint.read(key) for name, key in self.parts.items()}
        try:
            with torch.no_grad():
                value = self.make(parts).to(self.dtype).contiguous()
        except Exception as error:  # whatever a library raises for odd tensors
            raise not_dense(f"`{self.key}`: {error}") from error
        if tuple(value.shape) != self.shape:
            raise not_dense(f"`{self.key}` has the shape {list(value.shape)}, not {list(self.shape)}")
        return value


@dataclass(frozen=True)
class Quantization:
    """What is quantised in a checkpoint. `unused`: tensors that a dense checkpoint is without."""

    weights: list[QuantizedWeight]
    unused: frozenset[str] = field(default_factory=frozenset[str])


def library(name: str, package: str) -> Any:
    """A module of the library that has quantised the weights. Raises: P708 if it is not there."""
    try:
        return import_module(name)
    except Exception as error:  # an import may fail in many ways: another torch, a missing driver
        help_ = f"pip install {package}"
        raise not_dense(f"{package} cannot be imported: {type(error).__name__}: {error}", help_) from error


def not_dense(reason: str, help_: str | None = None) -> PeftcError:
    """P708."""
    message = "the quantised weights cannot be written out in full"
    return PeftcError(Diagnostic("P708", message, notes=(reason,), help=help_))
