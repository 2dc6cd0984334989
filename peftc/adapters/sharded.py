"""Tensors of which each process holds a part, as under FSDP2: gathered, and written by one process for all."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor. Where it is sharded, every process has to ask for it, in the same order."""
    there: Any = tensor
    return there.full_tensor() if is_sharded(tensor) else tensor


@contextmanager
def turn(tensors: Iterable[Tensor]) -> Generator[bool]:
    """Whether this process is the one that writes; where a tensor is sharded the others wait until it has.

    Raises: P526 in the others, where it has not.
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
