"""Reads a new checkpoint again, from the disk, and compares it with what it should be."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.merging.base_model import BaseModel
from peftc.merging.checkpoint import Checkpoint
from peftc.merging.layout import Layout
from peftc.merging.writer import MOST
from peftc.models.sources import resolve


def verify(base: Checkpoint, folder: Path, layout: Layout, digests: Mapping[str, str]) -> None:
    """Raises: P706 where bytes differ, or transformers would find other parameters.

    Args: `digests`: of the tensors that were computed, by key; the others are the base's.
    """
    merged = Checkpoint.open(folder)
    try:
        if {k: (e.dtype, e.shape) for k, e in merged.entries.items()} != {
            k: (e.dtype, e.shape) for k, e in layout.entries.items()
        }:
            raise _wrong("its files list other tensors than were written")
        for key, entry in merged.entries.items():
            _forget(merged.descriptor(entry.file), entry.start, entry.size)
            if digest(merged, key) != (digests[key] if key in digests else digest(base, key)):
                raise _wrong(f"`{key}` in {entry.file} is not what was written")
        BaseModel(resolve(folder), merged)
    finally:
        merged.close()


def digest(checkpoint: Checkpoint, key: str) -> str:
    """Of the bytes of a tensor, read in pieces."""
    entry, sha = checkpoint.entries[key], hashlib.sha256()
    for start in range(entry.start, entry.stop, MOST):
        sha.update(os.pread(checkpoint.descriptor(entry.file), min(MOST, entry.stop - start), start))
    return sha.hexdigest()


def _forget(descriptor: int, start: int, size: int) -> None:
    """Lets the next read come from the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def _wrong(reason: str) -> PeftcError:
    help_ = "merge again; if it stays so, the disk is not to be trusted, or this is a bug in peftc"
    return PeftcError(Diagnostic("P706", "the merged checkpoint is damaged", notes=(reason,), help=help_))
