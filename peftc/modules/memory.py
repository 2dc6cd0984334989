"""Where tensors lie in memory, and which of them share some of it: views of one storage, as objects of their own.

A fake tensor remembers where the tensor lay that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MEMORY = "_peftc_memory"  # the attribute of a fake tensor
MOST = 64  # views that are compared each with each; more of them, interleaved, are taken to overlap
STEPS = 64  # rows of a view that are compared one by one

Dims = tuple[tuple[int, int], ...]  # (bytes from one to the next, how many), the largest step first


@dataclass(frozen=True)
class Memory:
    """What a tensor covers, in bytes: `block` bytes at `start`, and again at every step of `dims`. `order`: how its entries
    lie there; two tensors of one `Memory` have the same entries at the same indices.
    """

    device: str
    start: int
    block: int
    dims: Dims
    order: tuple[object, ...]

    @property
    def stop(self) -> int:
        return self.start + extent(self.block, self.dims)

    @property
    def dense(self) -> bool:
        """Whether it covers all from `start` to `stop`."""
        return not self.dims


def memory_of(tensor: torch.Tensor) -> tuple[Memory, ...]:
    """What a tensor covers; several pieces for one that is made of tensors, none where there are no data."""
    if isinstance(tensor, FakeTensor):
        return vars(tensor).get(MEMORY, ())
    if is_traceable_wrapper_subclass(tensor):
        inner: Any = tensor
        parts = (getattr(inner, name) for name in inner.__tensor_flatten__()[0])
        return tuple(m for part in parts if isinstance(part, torch.Tensor) for m in memory_of(part))
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and others without one piece of memory
        return ()
    if not address or not tensor.numel():
        return ()
    size = tensor.element_size()
    block, dims = covered(size, [(step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True)])
    return (Memory(str(tensor.device), address, block, dims, (tensor.dtype, tuple(tensor.shape), tensor.stride())),)


def storage_id(tensor: torch.Tensor) -> int:
    """What tensors over one storage have in common, with data or without."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        try:
            return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
        except (RuntimeError, NotImplementedError):  # of quantised tensors and other subclasses
            return id(tensor)


def covered(block: int, dims: Iterable[tuple[int, int]]) -> tuple[int, Dims]:
    """A block of bytes and the steps at which it is repeated; steps from one block to the next make a larger block."""
    found: list[tuple[int, int]] = []
    for step, count in sorted(d for d in dims if d[0] and d[1] > 1):
        if not found and step == block:
            block *= count
        else:
            found.append((step, count))
    return block, tuple(reversed(found))


def extent(block: int, dims: Dims) -> int:
    """The bytes from the first to the last that is covered."""
    return block + sum(step * (count - 1) for step, count in dims)


def overlap(one: Memory, other: Memory) -> bool:
    """Whether two tensors have a byte in common; where that would take too long to find out, whether they may have."""
    return one.device == other.device and _meet(other.start - one.start, one.block, one.dims, other.block, other.dims)


def _meet(offset: int, block: int, dims: Dims, other: int, others: Dims) -> bool:
    """Whether blocks at 0 (with `dims`) meet blocks at `offset` (with `others`)."""
    if offset >= extent(block, dims) or offset + extent(other, others) <= 0:
        return False
    if not dims and not others:
        return True
    if dims and others and dims[0][0] == others[0][0]:
        (step, first), (_, second) = dims[0], others[0]
        shifts = _within(-(first - 1), second - 1, offset, step, extent(block, dims[1:]), extent(other, others[1:]))
        return any(_meet(offset + i * step, block, dims[1:], other, others[1:]) for i in shifts)
    if not dims or (others and others[0][0] > dims[0][0]):
        return _meet(-offset, other, others, block, dims)
    step, count = dims[0]
    shifts = _within(-(count - 1), 0, offset, step, extent(block, dims[1:]), extent(other, others))
    return len(shifts) > STEPS or any(_meet(offset + i * step, block, dims[1:], other, others) for i in shifts)


def _within(first: int, last: int, offset: int, step: int, here: int, there: int) -> range:
    """The i of [first, last] for which something of length `there` at `offset + i · step` meets [0, here)."""
    return range(max(first, -((there - 1 + offset) // step)), min(last, (here - 1 - offset) // step) + 1)


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that share memory, directly or by others, as indices; each tensor should be there once.

    The time is linear in the number of tensors but for sorting them.
    """
    pieces = sorted(
        ((m, i) for i, tensor in enumerate(tensors) for m in memory_of(tensor)),
        key=lambda piece: (piece[0].device, piece[0].start),
    )
    groups = _Groups()
    cluster: list[tuple[Memory, int]] = []
    stop = 0
    for memory, i in pieces:
        if cluster and (memory.device != cluster[0][0].device or memory.start >= stop):
            _join(cluster, groups)
            cluster, stop = [], 0
        cluster.append((memory, i))
        stop = max(stop, memory.stop)
    _join(cluster, groups)
    return groups.all()


def _join(cluster: list[tuple[Memory, int]], groups: _Groups) -> None:
    if len(cluster) > MOST:
        parts = _columns(cluster)
        for part in parts if len(parts) > 1 else ():
            _join(part, groups)
        for _, i in cluster[1:] if len(parts) == 1 else ():
            groups.join(cluster[0][1], i)
        return
    for at, (one, i) in enumerate(cluster):
        for other, j in cluster[at + 1 :]:
            if i != j and overlap(one, other):
                groups.join(i, j)


def _columns(cluster: list[tuple[Memory, int]]) -> list[list[tuple[Memory, int]]]:
    """The clusters of views that are columns of one matrix; all of them where they are not."""
    steps = {m.dims[0][0] if len(m.dims) == 1 else 0 for m, _ in cluster}
    step = steps.pop()
    if steps or not step or any(m.start % step + m.block > step for m, _ in cluster):
        return [cluster]
    parts: list[list[tuple[Memory, int]]] = []
    stop = 0
    for piece in sorted(cluster, key=lambda piece: piece[0].start % step):
        first = piece[0].start % step
        if not parts or first >= stop:
            parts.append([])
        parts[-1].append(piece)
        stop = max(stop, first + piece[0].block)
    return parts


class _Groups:
    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def root(self, i: int) -> int:
        while self.parent.setdefault(i, i) != i:
            i = self.parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        first, second = sorted((self.root(i), self.root(j)))
        self.parent[second] = first

    def all(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for i in sorted(self.parent):
            found.setdefault(self.root(i), []).append(i)
        return list(found.values())


def distinct(tensors: Sequence[torch.Tensor]) -> int:
    """Entries of tensors that share memory, those in common counted once."""
    pieces = sorted((m for tensor in tensors for m in memory_of(tensor)), key=lambda m: (m.start, -m.stop))
    total, reached, size = 0, 0, tensors[0].element_size()
    for memory in pieces:
        if memory.dense:
            total += max(0, memory.stop - max(memory.start, reached)) // size
            reached = max(reached, memory.stop)
    whole = [m for m in pieces if m.dense]
    rest = {
        m.start: m for m in pieces if not m.dense and not any(w.start <= m.start and m.stop <= w.stop for w in whole)
    }
    return total + sum(m.block * _count(m.dims) // size for m in rest.values())


def repeats(tensor: torch.Tensor) -> bool:
    """Whether entries of one tensor are in the same place, as those of an expanded one are."""
    return not tensor.is_contiguous() and bool(memory_of(tensor)) and distinct([tensor]) < tensor.numel()


def _count(dims: Dims) -> int:
    total = 1
    for _, count in dims:
        total *= count
    return total
