"""Writes the files of the new checkpoint. Tensors and copies may come in any order."""

from __future__ import annotations

import errno
import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from peftc.filesystem.direct_io import DirectWriter, Read
from peftc.merging.checkpoint import Checkpoint, bytes_of, damaged, read_into
from peftc.merging.layout import Copy, Layout

MOST = 2**25  # bytes that are copied at a time
Progress = Callable[[int], object]  # is told of the bytes written


class Writer:
    """The open files of a folder, with their headers.

    Args: `files`: those that this process writes; tensors of others are dropped. `hashed`: keeps
    the sha256 of each tensor, for `digests`.
    """

    def __init__(self, folder: Path, layout: Layout, files: Collection[str], hashed: bool = False) -> None:
        self.folder, self.layout, self.hashed = folder, layout, hashed
        self.hashes: dict[str, Any] = {}
        self.direct = DirectWriter()
        self.files: dict[str, int] = {}
        for file in files:
            shard = layout.shards[file]
            self.files[file] = os.open(folder / file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
            os.ftruncate(self.files[file], shard.size)
            write_all(self.files[file], memoryview(shard.header), 0)

    def copy(self, base: Checkpoint, copy: Copy) -> int:
        """Copies bytes. Raises: P701 for a shorter base."""
        source, target = base.descriptor(copy.file), self.files[copy.file]

        def read(buffer: memoryview, at: int) -> None:
            read_into(source, buffer, copy.start + at, copy.file)

        def write(at: int, stop: int) -> None:
            while at < stop:
                count = copy_range(source, target, stop - at, copy.start + at, copy.to + at)
                if not count:
                    raise damaged(copy.file, "it has become shorter while it was read")
                at += count

        self._write(copy.file, copy.to, copy.size, read, write)
        return copy.size

    def write(self, key: str, tensor: Tensor, at: int = 0) -> int:
        """A tensor, or a part of one from byte `at` on. The parts of one come in order."""
        entry = self.layout.entries[key]
        assert tuple(tensor.shape) == entry.shape or at + tensor.nbytes <= entry.size
        if entry.file not in self.files:
            return 0
        data = bytes_of(tensor.contiguous())
        if self.hashed:
            self.hashes.setdefault(key, hashlib.sha256()).update(data)
        start, target = entry.start + at, self.files[entry.file]

        def read(buffer: memoryview, at: int) -> None:
            buffer[:] = data[at : at + len(buffer)]

        def write(at: int, stop: int) -> None:
            write_all(target, data[at:stop], start + at)

        self._write(entry.file, start, len(data), read, write)
        return len(data)

    def _write(self, file: str, start: int, size: int, read: Read, write: Callable[[int, int], object]) -> None:
        """Whole pages directly, and what is left through the page cache."""
        first, last = self.direct.write(self.folder / file, start, size, read)
        for at, stop in ((0, first), (last, size)):
            if at < stop:
                write(at, stop)
                start_writing(self.files[file], start + at, stop - at)

    @property
    def digests(self) -> dict[str, str]:
        return {key: sha.hexdigest() for key, sha in self.hashes.items()}

    def flush(self) -> None:
        for descriptor in self.files.values():
            os.fsync(descriptor)

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()
        self.direct.close()


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + 2**30], start + done)


def copy_range(source: int, target: int, size: int, start: int, to: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, size, start, to)
        except OSError as error:
            if not _is_unsupported(error):
                raise
    data = os.pread(source, min(size, 2**22), start)
    write_all(target, memoryview(data), to)
    return len(data)


def _is_unsupported(error: OSError) -> bool:
    return error.errno in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Lets the system write these bytes while others are computed, and forget them then."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


class Background:
    """Runs writes in a thread, of which a few may wait. An error of one is raised by the next."""

    def __init__(self, pool: ThreadPoolExecutor, progress: Progress, waiting: int) -> None:
        self.pool, self.progress, self.waiting = pool, progress, waiting
        self.running: deque[Future[int]] = deque()

    def submit(self, function: Callable[[], int]) -> None:
        self.running.append(self.pool.submit(function))
        while len(self.running) > self.waiting:
            self.progress(self.running.popleft().result())

    def wait(self) -> None:
        while self.running:
            self.progress(self.running.popleft().result())


@contextmanager
def background(progress: Progress, waiting: int) -> Generator[Background]:
    with ThreadPoolExecutor(1) as pool:
        own = Background(pool, progress, waiting)
        try:
            yield own
            own.wait()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
