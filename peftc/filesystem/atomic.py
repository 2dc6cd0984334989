"""Atomic writes: locks on folders, temporary workspaces inside them, and fsync."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

PREFIX = ".peftc-"
PATIENCE = 60.0  # seconds to wait for another writer
_WORKSPACE = re.compile(rf"{re.escape(PREFIX)}[a-z0-9_]{{8}}")  # the names that tempfile makes of the prefix
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


def flush(*paths: Path) -> None:
    """Calls fsync on files and folders. File systems without fsync for folders are ignored."""
    for path in paths:
        is_folder = path.is_dir()
        if is_folder and sys.platform == "win32":
            continue
        descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not is_folder or error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


@contextmanager
def lock(folder: Path, patience: float | None = None) -> Generator[bool]:
    """Locks a folder without a lock file. Yields False if the file system has no locks.

    Args: `patience`: seconds to wait for another writer, by default `PATIENCE`.
    Raises: TimeoutError.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        locked = _acquire(descriptor, folder, time.monotonic() + (PATIENCE if patience is None else patience))
        try:
            yield locked
        finally:
            if locked:  # closing is not enough: a forked process has the descriptor, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, deadline: float) -> bool:
    while sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process is writing there", str(folder)) from None
            time.sleep(0.01)
        except OSError:
            return False
        else:
            return True
    return False


@contextmanager
def target_folder(path: Path) -> Generator[Path]:
    """Creates a folder and its parents. After an error, empty ones are removed again."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        yield path
    except BaseException:
        with suppress(OSError):
            for folder in created:
                folder.rmdir()
        raise


@contextmanager
def workspace(folder: Path) -> Generator[Path]:
    """A temporary folder inside `folder`, locked while its writer lives."""
    with ExitStack() as stack:
        with lock(folder):
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            stack.enter_context(lock(path))
        yield path


def is_workspace(path: Path) -> bool:
    return _WORKSPACE.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def dead_workspaces(folder: Path) -> Iterator[Path]:
    """Workspaces of writers that were killed. The caller must have locked `folder`."""
    for path in sorted(folder.iterdir()):
        if is_workspace(path):
            with suppress(OSError), lock(path, patience=0) as locked:
                if locked:
                    yield path


def remove_workspace(path: Path, names: Iterable[re.Pattern[str]]) -> None:
    """Removes a workspace if the names of all of its files match one of `names`."""
    patterns = tuple(names)
    files = [file for file in path.rglob("*") if not file.is_dir() or file.is_symlink()]
    if all(any(pattern.fullmatch(file.name) for pattern in patterns) for file in files):
        shutil.rmtree(path, ignore_errors=True)


def replace_text(target: Path, text: str) -> None:
    """Replaces the content of a file atomically, with the same permissions."""
    descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        shutil.copymode(target, name)
        flush(Path(name))
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
