"""Writes whole pages of a file from memory of this process, past the page cache of the system.

A page cache costs a copy and a new page for each page that is written, which is most of what it
costs to write a file of gigabytes that nobody reads soon. Not every file system can do without.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAGE = max(4096, mmap.PAGESIZE)
BUFFER = 2**22  # bytes that are written at a time; they stay in a cache of the processor
LEAST = 2**18  # bytes; of fewer, waiting for the disk costs more than the page cache
Read = Callable[[memoryview, int], object]  # fills a buffer with bytes from a place on


class DirectWriter:
    """Opens and writes files directly. Each process needs one of its own."""

    def __init__(self) -> None:
        self.files: dict[Path, int] = {}
        self.buffer: mmap.mmap | None = None

    def write(self, path: Path, start: int, size: int, read: Read) -> tuple[int, int]:
        """Writes the whole pages among some bytes of a file.

        Args: `read`: puts bytes into a buffer, counted from `start` on.

        Returns: where the bytes that were written begin and end, counted from `start` on. Both are
        0 for none: there are too few, or the system refuses.
        """
        first = -start % PAGE
        last = first + max(0, size - first) // PAGE * PAGE
        if last - first < LEAST or (descriptor := self.open(path)) < 0:
            return 0, 0
        if self.buffer is None:
            self.buffer = mmap.mmap(-1, BUFFER, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        done = first
        with memoryview(self.buffer) as buffer:
            while done < last:
                piece = buffer[: min(BUFFER, last - done)]
                read(piece, done)
                if (count := _write(descriptor, piece, start + done)) < len(piece):
                    self.refuse(path)
                    break
                done += count
        return (first, done) if done > first else (0, 0)

    def open(self, path: Path) -> int:
        """A descriptor; -1 where the system has none for direct writes."""
        if path not in self.files:
            self.files[path] = -1
            if sys.platform == "linux":
                with suppress(OSError):
                    self.files[path] = os.open(path, os.O_WRONLY | os.O_DIRECT)
        return self.files[path]

    def refuse(self, path: Path) -> None:
        os.close(self.files[path])
        self.files[path] = -1

    def close(self) -> None:
        for descriptor in self.files.values():
            if descriptor >= 0:
                os.close(descriptor)
        self.files.clear()


def _write(descriptor: int, data: memoryview, start: int) -> int:
    """How many bytes were written: none where the system wants other places or sizes."""
    try:
        return os.pwrite(descriptor, data, start)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return 0
