"""Threads for the pieces of a parameter. Operations of PyTorch release Python's lock while they
compute, so that two threads use two cores; more would wait for each other in Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
PARTS = 2  # whatever the number of threads, so that sums over parts have the same bits

_pool: ContextVar[Executor | None] = ContextVar("peftc_pool", default=None)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Generator[None]:
    """Inside of the block `in_parts` uses so many threads, PARTS at most."""
    if count < PARTS:
        yield
        return
    with ThreadPoolExecutor(PARTS - 1) as pool:
        token = _pool.set(pool)
        try:
            yield
        finally:
            _pool.reset(token)


def in_parts(work: Callable[[int], T]) -> list[T]:
    """`work` of each part, the first in this thread. Returns when all have ended."""
    if (pool := _pool.get()) is None:
        return [work(part) for part in range(PARTS)]
    others = [pool.submit(work, part) for part in range(1, PARTS)]
    try:
        first = work(0)
    finally:
        for other in others:  # they write into memory that is used again
            other.exception()
    return [first, *(other.result() for other in others)]
