"""Memory for tensors that are computed one after the other, and written in the background.

A system gives a process new pages one at a time, and clears each: that takes longer than to compute
what is stored there. So the memory of a tensor that has been written is that of a later one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

LARGEST = 2**27  # bytes of a tensor whose memory is kept


class Ring:
    """Buffers of some rounds. Each round has those of the round `rounds` before it."""

    def __init__(self, rounds: int) -> None:
        self.buffers: list[list[Tensor]] = [[] for _ in range(rounds)]
        self.round = self.taken = 0

    def turn(self) -> None:
        """Begins the next round."""
        self.round, self.taken = (self.round + 1) % len(self.buffers), 0

    def take(self, size: int) -> Tensor:
        own, index = self.buffers[self.round], self.taken
        self.taken += 1
        if index == len(own):
            own.append(torch.empty(size, dtype=torch.uint8))
        elif own[index].numel() < size:
            own[index] = torch.empty(size, dtype=torch.uint8)
        return own[index][:size]


_ring: ContextVar[Ring | None] = ContextVar("peftc_ring", default=None)


@contextmanager
def reused(rounds: int) -> Generator[None]:
    """Inside of the block `empty` gives memory again that it gave `rounds` rounds before."""
    token = _ring.set(Ring(rounds))
    try:
        yield
    finally:
        _ring.reset(token)


def next_round() -> None:
    if (ring := _ring.get()) is not None:
        ring.turn()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`torch.empty`, in memory that is used again inside of `reused`."""
    ring, size = _ring.get(), prod(shape) * dtype.itemsize
    if ring is None or not 0 < size <= LARGEST or (device is not None and device.type != "cpu"):
        return torch.empty(shape, dtype=dtype, device=device)
    return ring.take(size).view(dtype).view(shape)
