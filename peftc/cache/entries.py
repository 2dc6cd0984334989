"""Cached site tables, one file each. Whatever is wrong with a file, it is as if there were none.

A file is a line with the sha256 of the rest, and the rest: JSON with the whole key, the records of
the source files that the trace has used, and the table.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from peftc.addressing.sites import SiteTable
from peftc.cache.environment import are_pristine, environment, is_unchanged, source_records
from peftc.cache.location import cache_folder
from peftc.cache.table_json import decode_table, encode_table
from peftc.models.names import Request

FORMAT = 1
_MAX_BYTES = 64_000_000  # of a file
_MAX_FILES = 300


def read_table(request: Request) -> SiteTable | None:
    """The cached table of a model, or None."""
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError, AttributeError):
        key = _text(_key(request))
        entry = json.loads(_content(_file(folder, key)))
        if _text(entry["key"]) == key and is_unchanged(entry["files"]) and are_pristine(entry["classes"]):
            return decode_table(entry["table"])
    return None


def write_table(request: Request, table: SiteTable, classes: Iterable[type]) -> None:
    """Keeps the table of a trace. `classes`: of the model's modules and its configuration."""
    folder, used = cache_folder(), {base for cls in classes for base in cls.__mro__ if base.__module__ != "builtins"}
    if folder is None or not are_pristine((cls.__module__, cls.__qualname__) for cls in used):
        return
    with suppress(OSError, ValueError, TypeError, LookupError, RecursionError):
        data = encode_table(table)
        if decode_table(json.loads(json.dumps(data))) != table:
            return
        key = _key(request)
        names = sorted([cls.__module__, cls.__qualname__] for cls in used)
        body = _text({"key": key, "files": source_records(used), "classes": names, "table": data}).encode()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(_file(folder, _text(key)), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        _prune(folder)


def _key(request: Request) -> dict[str, Any]:
    """All that the table depends on and that is known without a trace."""
    model = {"name": request.name, "head": request.head, "values": request.values}
    return {"format": FORMAT, **model, "environment": environment()}


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
