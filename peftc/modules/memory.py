"""Where tensors lie in memory, and which of them overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

MEMORY = "_peftc_memory"  # attribute of a fake tensor: the memory of the original
MOST_VIEWS = 64  # compared pairwise; more that interleave count as overlapping
MOST_STEPS = 64  # rows of a view that are compared one by one

Dims = tuple[tuple[int, int], ...]  # (bytes from one to the next, how many), the largest step first


@dataclass(frozen=True)
class Memory:
    """The bytes of a tensor: `block` bytes at `start`, repeated at the steps of `dims`. Two tensors
    of equal `Memory` have the same entries at the same indices, by `layout`.
    """

    device: str
    start: int
    block: int
    dims: Dims
    layout: tuple[object, ...]

    @property
    def stop(self) -> int:
        return self.start + _extent(self.block, self.dims)

    def overlaps(self, other: Memory) -> bool:
        """Whether the two have a byte in common; True if it would take too long to find out."""
        offset = other.start - self.start
        return self.device == other.device and _overlap(offset, self.block, self.dims, other.block, other.dims)


def memory_of(tensor: torch.Tensor) -> tuple[Memory, ...]:
    """The memory of a tensor: several pieces for a wrapper subclass, none without data."""
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
    block, dims = _merge_dims(size, [(step * size, n) for step, n in zip(tensor.stride(), tensor.shape, strict=True)])
    return (Memory(str(tensor.device), address, block, dims, (tensor.dtype, tuple(tensor.shape), tensor.stride())),)


def storage_id(tensor: torch.Tensor) -> int:
    """The same for all tensors over one storage, with data or without."""
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return storage_of(tensor)


def storage_of(tensor: torch.Tensor) -> int:
    """`storage_id`, where nothing intercepts functions of torch."""
    try:
        return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    except (RuntimeError, NotImplementedError):  # quantised tensors and other subclasses
        return id(tensor)


def _merge_dims(block: int, dims: Iterable[tuple[int, int]]) -> tuple[int, Dims]:
    """A block with its repetitions; those without gaps make a larger block."""
    steps: list[tuple[int, int]] = []
    for step, count in sorted(d for d in dims if d[0] and d[1] > 1):
        if not steps and step == block:
            block *= count
        else:
            steps.append((step, count))
    return block, tuple(reversed(steps))


def _extent(block: int, dims: Dims) -> int:
    return block + sum(step * (count - 1) for step, count in dims)


def _overlap(offset: int, block: int, dims: Dims, other: int, others: Dims) -> bool:
    """Whether blocks at 0 (with `dims`) overlap blocks at `offset` (with `others`)."""
    if offset >= _extent(block, dims) or offset + _extent(other, others) <= 0:
        return False
    if not dims and not others:
        return True
    if dims and others and dims[0][0] == others[0][0]:
        (step, first), (_, second) = dims[0], others[0]
        shifts = _shifts(-(first - 1), second - 1, offset, step, _extent(block, dims[1:]), _extent(other, others[1:]))
        return any(_overlap(offset + i * step, block, dims[1:], other, others[1:]) for i in shifts)
    if not dims or (others and others[0][0] > dims[0][0]):
        return _overlap(-offset, other, others, block, dims)
    step, count = dims[0]
    shifts = _shifts(-(count - 1), 0, offset, step, _extent(block, dims[1:]), _extent(other, others))
    return len(shifts) > MOST_STEPS or any(_overlap(offset + i * step, block, dims[1:], other, others) for i in shifts)


def _shifts(first: int, last: int, offset: int, step: int, length: int, other: int) -> range:
    """The i of [first, last] for which `other` bytes at `offset + i · step` overlap [0, length)."""
    return range(max(first, -((other - 1 + offset) // step)), min(last, (length - 1 - offset) // step) + 1)


def overlapping(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Groups of tensors that share memory, as indices; but for sorting, in linear time."""
    return overlapping_pieces([(memory, i) for i, tensor in enumerate(tensors) for memory in memory_of(tensor)])


def overlapping_pieces(pieces: list[tuple[Memory, int]]) -> list[list[int]]:
    """Groups of tensors that share memory, as indices. `pieces`: of memory, with those indices."""
    pieces.sort(key=lambda piece: (piece[0].device, piece[0].start))
    groups = _DisjointSets()
    cluster: list[tuple[Memory, int]] = []
    stop = 0
    for memory, i in pieces:
        if cluster and (memory.device != cluster[0][0].device or memory.start >= stop):
            _join_overlapping(cluster, groups)
            cluster, stop = [], 0
        cluster.append((memory, i))
        stop = max(stop, memory.stop)
    _join_overlapping(cluster, groups)
    return groups.all()


def _join_overlapping(cluster: list[tuple[Memory, int]], groups: _DisjointSets) -> None:
    if len(cluster) > MOST_VIEWS:
        parts = _column_clusters(cluster)
        for part in parts if len(parts) > 1 else ():
            _join_overlapping(part, groups)
        for _, i in cluster[1:] if len(parts) == 1 else ():
            groups.join(cluster[0][1], i)
        return
    for n, (one, i) in enumerate(cluster):
        for other, j in cluster[n + 1 :]:
            if i != j and one.overlaps(other):
                groups.join(i, j)


def _column_clusters(cluster: list[tuple[Memory, int]]) -> list[list[tuple[Memory, int]]]:
    """Splits views that are columns of one matrix by shared columns; others stay together."""
    steps = {m.dims[0][0] if len(m.dims) == 1 else 0 for m, _ in cluster}
    step = steps.pop()
    if steps or not step or any(m.start % step + m.block > step for m, _ in cluster):
        return [cluster]
    parts: list[list[tuple[Memory, int]]] = []
    stop = 0
    for memory, i in sorted(cluster, key=lambda piece: piece[0].start % step):
        first = memory.start % step
        if not parts or first >= stop:
            parts.append([])
        parts[-1].append((memory, i))
        stop = max(stop, first + memory.block)
    return parts


class _DisjointSets:
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
        groups: dict[int, list[int]] = {}
        for i in sorted(self.parent):
            groups.setdefault(self.root(i), []).append(i)
        return list(groups.values())


def distinct_entries(tensors: Sequence[torch.Tensor]) -> int:
    """The number of entries of tensors that share memory, those in common counted once."""
    pieces = sorted((m for tensor in tensors for m in memory_of(tensor)), key=lambda m: (m.start, -m.stop))
    dense = [m for m in pieces if not m.dims]
    size, total, end = tensors[0].element_size(), 0, 0
    for memory in dense:
        total += max(0, memory.stop - max(memory.start, end)) // size
        end = max(end, memory.stop)
    outside = {m.start: m for m in pieces if m.dims and not any(d.start <= m.start and m.stop <= d.stop for d in dense)}
    return total + sum(m.block * math.prod(count for _, count in m.dims) // size for m in outside.values())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether entries of a tensor share memory, as those of an expanded one do."""
    return not tensor.is_contiguous() and bool(memory_of(tensor)) and distinct_entries([tensor]) < tensor.numel()
