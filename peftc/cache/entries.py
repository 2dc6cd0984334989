"""Entries of the cache, one file each: site tables, and compilations. Whatever is wrong with a
file, it is as if there were none.

A file is a line with the sha256 of the rest, and the rest: JSON with the whole key, the records of
the source files that the trace has used, and what it was made for.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from peftc.addressing.sites import SiteTable
from peftc.cache.environment import are_pristine, environment, is_unchanged, source_records
from peftc.cache.location import cache_folder
from peftc.cache.table_json import decode_table, encode_table
from peftc.models.names import Request

T = TypeVar("T")
FORMAT = 6
_MAX_BYTES = 64_000_000  # of a file
_MAX_FILES = 300


def read_table(request: Request) -> SiteTable | None:
    """The cached table of a model, or None."""
    return read(table_key(request), lambda entry: decode_table(entry["table"]))


def has_table(request: Request) -> bool:
    """Whether there is a cached table of a model; without decoding it."""
    return read(table_key(request), lambda entry: "table" in entry) is True


def table_digest(request: Request) -> str | None:
    """What identifies the entry of a table: it changes with anything that the table depends on."""
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError, ValueError):
        return hashlib.sha256(_content(_file(folder, _text(table_key(request))))).hexdigest()
    return None


def write_table(request: Request, table: SiteTable, classes: Iterable[type]) -> None:
    """Keeps the table of a trace. `classes`: of the model's modules and its configuration."""

    def content() -> dict[str, Any]:
        data = encode_table(table)
        if decode_table(json.loads(json.dumps(data))) != table:
            raise ValueError
        return {"table": data}

    write(lambda: table_key(request), content, classes)


def table_key(request: Request) -> dict[str, Any]:
    """All that the table depends on and that is known without a trace."""
    model = {"name": request.name, "head": request.head, "values": request.values}
    return {"format": FORMAT, **model, "environment": environment()}


def read(key: Mapping[str, Any], decode: Callable[[Mapping[str, Any]], T]) -> T | None:
    """What `decode` makes of the entry of a key; None if there is none, or anything has changed."""
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError, AttributeError):
        text = _text(key)
        entry = json.loads(_content(_file(folder, text)))
        if _text(entry["key"]) == text and is_unchanged(entry["files"]) and are_pristine(entry["classes"]):
            return decode(entry)
    return None


def write(
    make_key: Callable[[], Mapping[str, Any]], make_content: Callable[[], Mapping[str, Any]], classes: Iterable[type]
) -> None:
    """Keeps an entry. Nothing is kept, in silence, where a file or a class is not as it should be.

    Args: `make_content`: the rest of the entry; may raise a ValueError for what is not to be kept.
    `classes`: those that the entry depends on.
    """
    folder, used = cache_folder(), {base for cls in classes for base in cls.__mro__ if base.__module__ != "builtins"}
    if folder is None or not are_pristine((cls.__module__, cls.__qualname__) for cls in used):
        return
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        content, key = make_content(), make_key()
        names = sorted([cls.__module__, cls.__qualname__] for cls in used)
        body = _text({"key": key, "files": source_records(used), "classes": names, **content}).encode()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(_file(folder, _text(key)), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        _prune(folder)


def count_entries(folder: Path) -> tuple[int, int, int]:
    """How many entries a folder has, how many of these are unusable, and their size in bytes."""
    paths = [path for path in folder.glob("*.json") if path.is_file()] if folder.is_dir() else []
    unusable = 0
    for path in paths:
        try:
            _content(path)
        except (OSError, ValueError):
            unusable += 1
    return len(paths), unusable, sum(path.stat().st_size for path in paths)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _content(path: Path) -> bytes:
    """The body of a file. Raises: ValueError if it is damaged, or another user may write it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise ValueError
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or status.st_mode & 0o022):
            raise ValueError
        checksum, _, body = file.read(_MAX_BYTES).partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise ValueError
    return body


def _replace(path: Path, content: bytes) -> None:
    """Writes a file as a whole: of two processes, one is last."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)  # only its owner may read or write it
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _prune(folder: Path) -> None:
    """Removes the oldest files above a number: other versions of everything have left them."""
    ages: list[tuple[float, str]] = []
    for name in os.listdir(folder):
        with suppress(OSError):  # another process has removed it
            ages.append((os.stat(folder / name).st_mtime, name))
    for _, name in sorted(ages, reverse=True)[_MAX_FILES:]:
        with suppress(OSError):
            os.unlink(folder / name)
