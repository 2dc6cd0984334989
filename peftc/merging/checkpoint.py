"""The files of a safetensors checkpoint: where each tensor lies, copies of tensors, and views.

A view is private memory over the file: pages are read when they are used, and writes stay here.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peftc.adapters.base import VALUES
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import check_regular, read_regular
from peftc.folding.memory import LARGEST, empty

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 256_000_000  # bytes
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # files may be larger than memory
_PRIVATE = 2


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `start`, `stop`: bytes from the beginning of the file."""

    key: str
    file: str
    dtype: str  # as safetensors names it: "BF16"
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Shard:
    """One file: its header with the eight bytes before it, and its tensors in their order."""

    file: str
    header: bytes
    entries: tuple[Entry, ...]
    size: int

    @property
    def metadata(self) -> dict[str, str]:
        return json.loads(self.header[8:]).get("__metadata__", {})


class Checkpoint:
    """The tensors of a folder, by key. `index`: what its index says, if it has one."""

    def __init__(self, folder: Path, shards: Iterable[Shard], index: Mapping[str, Any] | None) -> None:
        self.folder, self.index = folder, index
        self.shards = {shard.file: shard for shard in shards}
        self.entries = {entry.key: entry for shard in self.shards.values() for entry in shard.entries}
        self.maps: dict[str, mmap.mmap] = {}
        self.files: dict[str, int] = {}
        self.ahead: dict[str, Future[Tensor]] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Raises: P505 (no weights), P701 (damaged files)."""
        index = _read_index(folder)
        files = [WEIGHTS] if index is None else list(dict.fromkeys(index["weight_map"].values()))
        shards = [read_shard(folder, file) for file in files]
        if index is not None:
            _check_index(index["weight_map"], shards)
        return cls(folder, shards, index)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards.values())

    def descriptor(self, file: str) -> int:
        if file not in self.files:
            self.files[file] = os.open(self.folder / file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        return self.files[file]

    def view(self, key: str) -> Tensor:
        """A tensor over the file itself."""
        entry = self.entries[key]
        if entry.file not in self.maps:
            options: dict[str, Any] = {"access": mmap.ACCESS_COPY}
            if sys.platform == "linux":
                options = {"flags": _PRIVATE | _NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
            self.maps[entry.file] = mmap.mmap(self.descriptor(entry.file), 0, **options)
        if not entry.size or entry.start % DTYPES[entry.dtype].itemsize:
            return self.read(key)  # torch has no tensors at odd addresses
        count = prod(entry.shape)
        return torch.frombuffer(self.maps[entry.file], dtype=DTYPES[entry.dtype], count=count, offset=entry.start).view(
            entry.shape
        )

    def read(self, key: str) -> Tensor:
        """A copy of a tensor. Raises: P701 if the file has become shorter."""
        if (ahead := self.ahead.pop(key, None)) is not None:
            return ahead.result()
        entry = self.entries[key]
        return self._fill(entry, empty(entry.shape, DTYPES[entry.dtype]))

    def _fill(self, entry: Entry, tensor: Tensor) -> Tensor:
        if entry.size:
            read_into(self.descriptor(entry.file), bytes_of(tensor), entry.start, entry.file)
        return tensor

    @contextmanager
    def reading_ahead(self) -> Generator[Callable[[Iterable[str]], object]]:
        """Yields what reads tensors in a thread, for the `read` that asks for them next."""
        with ThreadPoolExecutor(1) as pool:

            def read_ahead(keys: Iterable[str]) -> None:
                computed = self.computed()
                for entry in (self.entries[key] for key in keys if key not in computed):
                    if entry.size <= LARGEST and entry.key not in self.ahead:
                        self.descriptor(entry.file)  # opened by one thread
                        tensor = empty(entry.shape, DTYPES[entry.dtype])
                        self.ahead[entry.key] = pool.submit(self._fill, entry, tensor)

            try:
                yield read_ahead
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
                self.ahead.clear()

    def read_slice(self, key: str, index: int, count: int) -> Tensor:
        """One of `count` equal parts of a tensor along its first dimension."""
        entry = self.entries[key]
        tensor = empty((entry.shape[0] // count, *entry.shape[1:]), DTYPES[entry.dtype])
        if entry.size:
            start = entry.start + index * tensor.nbytes
            read_into(self.descriptor(entry.file), bytes_of(tensor), start, entry.file)
        return tensor

    def sample(self, key: str) -> Tensor:
        """A tensor of zeros, but for the entries that adapters keep of their base.

        These few are read by themselves: a view would bring large pieces of the file into memory.
        """
        entry = self.entries[key]
        tensor = placeholder(entry.shape, DTYPES[entry.dtype])
        flat, size = tensor.view(-1), DTYPES[entry.dtype].itemsize
        for place in dict.fromkeys(sample_places(tensor.numel()).tolist()):
            data = bytearray(os.pread(self.descriptor(entry.file), size, entry.start + place * size))
            flat[place] = torch.frombuffer(data, dtype=tensor.dtype)[0]
        return tensor

    def forget(self) -> None:
        """Gives back the pages of all views; what was written there is lost."""
        for pages in self.maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                pages.madvise(mmap.MADV_DONTNEED)

    def computed(self) -> Collection[str]:
        """The keys of tensors that are no bytes of a file, but computed when they are read."""
        return ()

    def add_alias(self, key: str, of: str) -> None:
        """A second key of a tensor."""
        self.entries[key] = replace(self.entries[of], key=key)

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files.clear()


def placeholder(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros that takes no memory until it is written."""
    shape = tuple(shape)
    size = prod(shape) * dtype.itemsize
    if not size or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def sample_places(count: int) -> Tensor:
    """Where `peftc.adapters.base.samples` reads a parameter of `count` entries."""
    return torch.linspace(0, count - 1, VALUES if count else 0, dtype=torch.float64).long()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def read_into(descriptor: int, buffer: memoryview, start: int, file: str) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + 2**30]], start + done)
        if not count:
            raise damaged(file, "it has become shorter while it was read")
        done += count


def read_shard(folder: Path, file: str) -> Shard:
    """Raises: P505 (no such file), P701 (no safetensors file, or not all of one)."""
    path = folder / file
    try:
        check_regular(path, path.stat())
        with safe_open(path, "pt"):  # checks the header, and that the file is as long as it says
            pass
        with path.open("rb") as opened:
            length = opened.read(8)
            header = length + opened.read(int.from_bytes(length, "little"))
    except FileNotFoundError as error:
        message = f"the weights of {folder} are missing"
        raise PeftcError(Diagnostic("P505", message, notes=(f"there is no `{file}`",))) from error
    except (OSError, SafetensorError) as error:
        raise damaged(file, f"{error}") from error
    listed: dict[str, Any] = json.loads(header[8:])
    entries: list[Entry] = []
    for key, value in listed.items():
        if key != "__metadata__":
            start, stop = (len(header) + n for n in value["data_offsets"])
            entries.append(Entry(key, file, value["dtype"], tuple(value["shape"]), start, stop))
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    return Shard(file, header, tuple(entries), path.stat().st_size)


def _read_index(folder: Path) -> dict[str, Any] | None:
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return None
    try:
        index = json.loads(read_regular(folder / INDEX, LARGEST_INDEX))
        files: list[object] = list(index["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(INDEX, f"it is no index of tensors: {error}") from error
    wrong = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if wrong or not files:
        raise damaged(INDEX, f"it names {wrong[0]!r}, not a file beside it" if wrong else "it names no files")
    return index


def _check_index(weight_map: Mapping[str, str], shards: Iterable[Shard]) -> None:
    there = [(entry.key, entry.file) for shard in shards for entry in shard.entries]
    if len(dict(there)) < len(there):
        keys = [key for key, _ in there]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise damaged(INDEX, f"two of its files have `{twice}`")
    for key, file in {**weight_map, **dict(there)}.items():
        if weight_map.get(key) != dict(there).get(key):
            listed, actual = weight_map.get(key, "no file"), dict(there).get(key, "no file")
            raise damaged(INDEX, f"`{key}` is in {actual}, and {listed} is listed for {file and key!r}")


def damaged(file: str, reason: str) -> PeftcError:
    """P701."""
    help_ = "fetch the checkpoint again, or write it again"
    return PeftcError(Diagnostic("P701", f"the checkpoint is damaged: `{file}`", notes=(reason,), help=help_))
