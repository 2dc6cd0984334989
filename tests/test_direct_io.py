"""Bytes that go to a file past the page cache are those that were meant, whatever their places."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from peftc.filesystem import direct_io
from peftc.filesystem.direct_io import BUFFER, LEAST, PAGE, DirectWriter
from peftc.merging import writer
from peftc.merging.checkpoint import Checkpoint, Entry, Shard
from peftc.merging.layout import Copy, Layout

SIZE = 3 * BUFFER + 777


def write(path: Path, data: bytes, start: int) -> tuple[int, int]:
    """Writes through a `DirectWriter`, and all that it leaves as a plain file."""
    own = DirectWriter()

    def read(buffer: memoryview, at: int) -> None:
        buffer[:] = data[at : at + len(buffer)]

    try:
        first, last = own.write(path, start, len(data), read)
    finally:
        own.close()
    with path.open("r+b") as file:
        for at, stop in ((0, first), (last, len(data))):
            file.seek(start + at)
            file.write(data[at:stop])
    return first, last


@pytest.mark.parametrize("start", [0, 1, PAGE - 1, PAGE, 5 * PAGE + 464])
@pytest.mark.parametrize("size", [0, 5, PAGE, LEAST - 1, LEAST + PAGE, BUFFER, 2 * BUFFER + 3 * PAGE + 17])
def test_all_bytes_are_in_their_places(start: int, size: int, tmp_path: Path) -> None:
    path, before = tmp_path / "x", random.Random(0).randbytes(SIZE)
    path.write_bytes(before)
    data = random.Random(1).randbytes(size)
    first, last = write(path, data, start)
    assert path.read_bytes() == before[:start] + data + before[start + size :]
    assert first == last == 0 or ((start + first) % PAGE == (start + last) % PAGE == 0 and last - first >= LEAST)


def is_direct(folder: Path) -> bool:
    """Whether this file system can."""
    (folder / "probe").write_bytes(bytes(2 * LEAST))
    return write(folder / "probe", bytes(2 * LEAST), 0) != (0, 0)


def test_large_pieces_are_written_directly(tmp_path: Path) -> None:
    if not is_direct(tmp_path):
        pytest.skip("this file system has no direct writes")
    (tmp_path / "x").write_bytes(bytes(SIZE))
    assert write(tmp_path / "x", random.Random(1).randbytes(BUFFER + 9), 100) == (PAGE - 100, BUFFER - 100)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_file_system_that_refuses_gets_the_rest_otherwise(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data, calls = tmp_path / "x", random.Random(1).randbytes(2 * BUFFER + 9), [0]
    path.write_bytes(bytes(SIZE))
    monkeypatch.setattr(direct_io.DirectWriter, "open", lambda self, path: opened(self, path))

    def opened(self: DirectWriter, path: Path) -> int:
        return self.files.setdefault(path, os.open(path, os.O_WRONLY))

    def pwrite(descriptor: int, buffer: memoryview, start: int) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(code, os.strerror(code))
        return original(descriptor, buffer, start)

    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    if code == errno.ENOSPC:
        with pytest.raises(OSError, match="No space"):
            write(path, data, 10)
        return
    assert write(path, data, 10) == (PAGE - 10, BUFFER + PAGE - 10)
    assert path.read_bytes() == bytes(10) + data + bytes(SIZE - len(data) - 10)


def test_a_writer_writes_tensors_and_copies_of_all_sizes(tmp_path: Path) -> None:
    """Without a merge around it: files of several tensors whose edges share pages."""
    import torch

    (tmp_path / "base").mkdir()
    (tmp_path / "new").mkdir()
    sizes = [700_001, 3, BUFFER + 11, 5000, 2 * LEAST]
    entries, at = list[Entry](), 8
    for i, size in enumerate(sizes):
        entries.append(Entry(str(i), "f", "U8", (size,), at, at + size))
        at += size
    shard = Shard("f", b"\0" * 8, tuple(entries), at)
    data = b"\0" * 8 + random.Random(2).randbytes(at - 8)
    (tmp_path / "base" / "f").write_bytes(data)
    base = Checkpoint(tmp_path / "base", [shard], None)
    own = writer.Writer(tmp_path / "new", Layout({"f": shard}, base.entries), ["f"])
    try:
        for entry in entries[::2]:
            own.copy(base, Copy("f", entry.start, entry.size, entry.start))
        for entry in entries[1::2]:
            own.write(entry.key, torch.frombuffer(bytearray(data[entry.start : entry.stop]), dtype=torch.uint8))
        own.flush()
    finally:
        own.close()
        base.close()
    assert (tmp_path / "new" / "f").read_bytes() == data
