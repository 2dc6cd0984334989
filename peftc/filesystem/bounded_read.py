"""Reading files that others have written: only regular files, none of them larger than a limit."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from os import PathLike

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.diagnostic import printable

_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_regular(path: str | PathLike[str], limit: int) -> bytes:
    """The content of a regular file.

    Args: `limit`: bytes.
    Raises: as `open_regular`.
    """
    with open_regular(path, limit) as file:
        data = file.read(limit + 1) or b""
    if len(data) > limit:  # it has grown, or is one of those that do not tell their size
        raise _too_large(path, f"more than {limit:,}", limit)
    return data


def open_regular(path: str | PathLike[str], limit: int) -> BufferedReader:
    """A regular file, open for reading. Whatever else has that name is not opened, so that nothing waits for another process.

    Args: `limit`: bytes.
    Raises: P026 where it is a directory, a pipe, a socket, a device, or no path at all; P027 where it is larger; OSError where it
    cannot be opened.
    """
    check_path(path)
    check_regular(path, os.stat(path))
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)  # again: the name may stand for another file by now
        check_regular(path, status)
        if status.st_size > limit:
            raise _too_large(path, f"{status.st_size:,}", limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_path(path: str | PathLike[str]) -> None:
    """Raises: P026 where a text is no path: it has a NUL, or half of a surrogate pair."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass
    raise PeftcError(Diagnostic("P026", f"`{printable_path(path)}` is no path: it has a character that no path has"))


def printable_path(path: str | PathLike[str]) -> str:
    """A path as messages have it: on one line, whatever characters it has."""
    return printable(os.fspath(path))


def check_regular(path: str | PathLike[str], status: os.stat_result) -> None:
    """Raises: P026 where what has this status is no regular file."""
    if not stat.S_ISREG(status.st_mode):
        what = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise PeftcError(
            Diagnostic("P026", f"{printable_path(path)} is {what}, not a file", help="only regular files are read")
        )


def _too_large(path: str | PathLike[str], size: str, limit: int) -> PeftcError:
    return PeftcError(Diagnostic("P027", f"{printable_path(path)} has {size} bytes; at most {limit:,} are read"))
