"""Reads untrusted files: only regular files, up to a size limit."""

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
    """The content of a regular file of at most `limit` bytes. Raises: as `open_regular`."""
    with open_regular(path, limit) as file:
        data = file.read(limit + 1) or b""
    if len(data) > limit:  # the file has grown, or its status has no size
        raise _too_large(path, f"more than {limit:,}", limit)
    return data


def open_regular(path: str | PathLike[str], limit: int) -> BufferedReader:
    """Opens a regular file of at most `limit` bytes, and nothing else: no read can block.

    Raises: P026 for any other kind of file or an invalid path, P027 for a larger file, OSError.
    """
    check_path(path)
    check_regular(path, os.stat(path))
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)  # the path may have been replaced since `os.stat`
        check_regular(path, status)
        if status.st_size > limit:
            raise _too_large(path, f"{status.st_size:,}", limit)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_path(path: str | PathLike[str]) -> None:
    """Raises: P026 for a text with a NUL or a lone surrogate, which cannot be a path."""
    try:
        if b"\0" not in os.fsencode(path):
            return
    except UnicodeEncodeError:
        pass
    message = f"`{printable_path(path)}` is not a path: it contains a character that no path has"
    raise PeftcError(Diagnostic("P026", message))


def printable_path(path: str | PathLike[str]) -> str:
    """A path in a message: on one line, without control characters."""
    return printable(os.fspath(path))


def check_regular(path: str | PathLike[str], status: os.stat_result) -> None:
    """Raises: P026 if `status` is not that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        message = f"{printable_path(path)} is {kind}, not a file"
        raise PeftcError(Diagnostic("P026", message, help="only regular files are read"))


def _too_large(path: str | PathLike[str], size: str, limit: int) -> PeftcError:
    return PeftcError(Diagnostic("P027", f"{printable_path(path)} has {size} bytes; at most {limit:,} are read"))
