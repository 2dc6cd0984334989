"""Weights that may have no values, be offloaded, or be sharded over processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import has_values
from peftc.modules.offload import offloaded_error, offloaded_parameters


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def require_values(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises: P527 for a tensor without values."""
    missing = [name for name, tensor in tensors if not has_values(tensor)]
    if missing:
        message = f"{len(missing)} of the parameters have no values, such as `{missing[0]}`"
        raise PeftcError(Diagnostic("P527", message, help="load the weights of the model first"))


def require_base(model: nn.Module) -> None:
    """Raises: P566 for offloaded weights, P527 for weights without values."""
    if elsewhere := offloaded_parameters(model):
        raise PeftcError(offloaded_error(elsewhere, "weights are changed in the places where they are"))
    require_values(model.named_parameters())


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor. A collective call: every process makes it, in the same order."""
    dtensor: Any = tensor
    return dtensor.full_tensor() if is_sharded(tensor) else tensor


@contextmanager
def elect_writer(tensors: Iterable[Tensor]) -> Generator[bool]:
    """Yields whether this process writes. If a tensor is sharded, the others wait for rank 0.

    Raises: P526 in the others if rank 0 fails.
    """
    if not (any(map(is_sharded, tensors)) and dist.is_initialized()):
        yield True
        return
    done = [False]
    try:
        yield dist.get_rank() == 0
        done = [True]
    finally:
        dist.broadcast_object_list(done, src=0)
    if not done[0]:
        message = "the adapter has not been saved: the process that writes it has failed"
        raise PeftcError(Diagnostic("P526", message, help="the error of rank 0 says why"))
