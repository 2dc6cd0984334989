"""Texts that an editor has open, and has not saved: they are read in the place of their files."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike


@dataclass(frozen=True)
class OpenTexts:
    """What is open while some files are read.

    Attributes:
        texts: by the real path of a file.
        reads: the real paths of all files that were asked for, open or not.
    """

    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    reads: set[str] = field(default_factory=set[str])


_open: ContextVar[OpenTexts | None] = ContextVar("peftc_open_texts", default=None)


@contextmanager
def reading(texts: OpenTexts) -> Generator[None]:
    """Reads `texts` in the place of files, in this context."""
    token = _open.set(texts)
    try:
        yield
    finally:
        _open.reset(token)


def open_text(path: str | PathLike[str]) -> bytes | None:
    """The text of a file that an editor has open; None for any other file."""
    if (texts := _open.get()) is None:
        return None
    real = os.path.realpath(path)
    texts.reads.add(real)
    text = texts.texts.get(real)
    return None if text is None else text.encode("utf-8", "surrogatepass")


def exists(path: str | PathLike[str]) -> bool:
    """Whether there is a file, on disk or in an editor."""
    return open_text(path) is not None or os.path.exists(path)
