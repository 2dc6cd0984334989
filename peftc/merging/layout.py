"""Where each tensor of the new checkpoint lies: as in the base, unless shapes or keys change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from peftc.merging.checkpoint import DTYPES, Checkpoint, Entry, Shard

NewTensor = tuple[str, tuple[int, ...]]  # dtype as safetensors names it, shape


@dataclass(frozen=True)
class Copy:
    """Bytes of a file of the base that go into the file of the same name."""

    file: str
    start: int
    size: int
    to: int


@dataclass(frozen=True)
class Layout:
    """The files of the new checkpoint.

    Attributes:
        shards: by file name.
        entries: by key.
        index: of several files, else None.
    """

    shards: Mapping[str, Shard]
    entries: Mapping[str, Entry]
    index: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        return sum(shard.size for shard in self.shards.values())

    def copies(self, base: Checkpoint, written: Iterable[str], most: int) -> list[Copy]:
        """What is copied: neighbours that are not `written` together, in pieces of `most` bytes."""
        without, copies = frozenset(written), list[Copy]()
        for entry in (e for shard in self.shards.values() for e in shard.entries if e.key not in without):
            old = base.entries[entry.key]
            last = copies[-1] if copies else None
            if last and (last.file, last.start + last.size, last.to + last.size) == (old.file, old.start, entry.start):
                copies[-1] = replace(last, size=last.size + old.size)
            else:
                copies.append(Copy(old.file, old.start, old.size, entry.start))
        return [
            Copy(copy.file, copy.start + n, min(most, copy.size - n), copy.to + n)
            for copy in copies
            for n in range(0, copy.size, most)
        ]


@dataclass
class Changes:
    """What the new checkpoint has else than the base.

    Attributes:
        tensors: with another shape, by key.
        added: new tensors by key, with the file.
        replaced: by the key of a tensor, the one in its place, or None.
        configuration: values of config.json.
        dropped: keys that config.json is without.
        metadata: of all files, if it is not that of the base.
    """

    tensors: dict[str, NewTensor] = field(default_factory=dict[str, NewTensor])
    added: dict[str, tuple[str, NewTensor]] = field(default_factory=dict[str, tuple[str, NewTensor]])
    replaced: dict[str, tuple[str, NewTensor] | None] = field(default_factory=dict[str, tuple[str, NewTensor] | None])
    configuration: dict[str, Any] = field(default_factory=dict[str, Any])
    dropped: tuple[str, ...] = ()
    metadata: dict[str, str] | None = None


def layout_of(base: Checkpoint, changes: Changes) -> Layout:
    shards = {file: _shard(shard, changes) for file, shard in base.shards.items()}
    entries = {entry.key: entry for shard in shards.values() for entry in shard.entries}
    old = [entry for shard in base.shards.values() for entry in shard.entries]
    return Layout(shards, entries, None if base.index is None else _index(base.index, shards, old))


def _shard(shard: Shard, changes: Changes) -> Shard:
    tensors = (changes.replaced.get(e.key, (e.key, (e.dtype, e.shape))) for e in shard.entries)
    listed = [(key, changes.tensors.get(key, own)) for key, own in (one for one in tensors if one is not None)]
    listed += [(key, new) for key, (file, new) in changes.added.items() if file == shard.file]
    metadata = shard.metadata if changes.metadata is None else changes.metadata
    if listed == [(e.key, (e.dtype, e.shape)) for e in shard.entries] and metadata == shard.metadata:
        return shard
    offset, offsets = 0, dict[str, tuple[int, int]]()
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for key, (dtype, shape) in listed:
        stop = offset + prod(shape) * DTYPES[dtype].itemsize
        offsets[key] = (offset, stop)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text) + 8
    entries = tuple(
        Entry(key, shard.file, dtype, shape, start + offsets[key][0], start + offsets[key][1])
        for key, (dtype, shape) in listed
    )
    return Shard(shard.file, len(text).to_bytes(8, "little") + text, entries, start + offset)


def _index(index: Mapping[str, Any], shards: Mapping[str, Shard], before: Sequence[Entry]) -> dict[str, Any]:
    weight_map = {e.key: e.file for shard in shards.values() for e in shard.entries}
    own: dict[str, str] = index["weight_map"]
    ordered = {key: weight_map[key] for key in own if key in weight_map} | weight_map
    new = {**index, "weight_map": dict(sorted(ordered.items())) if list(own) == sorted(own) else ordered}
    metadata = dict(index.get("metadata") or {})
    entries = [e for shard in shards.values() for e in shard.entries]
    counts: dict[str, Callable[[Entry], int]] = {
        "total_size": lambda e: e.size,
        "total_parameters": lambda e: prod(e.shape),
    }
    for name, count in counts.items():
        if isinstance(metadata.get(name), int):
            metadata[name] += sum(map(count, entries)) - sum(map(count, before))
    return new | {"metadata": metadata} if "metadata" in index else new
