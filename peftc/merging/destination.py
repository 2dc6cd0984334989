"""The new folder of a merge or an export: it appears complete and on disk, or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.atomic import flush, lock

PREFIX = ".peftc-merge-"


def check_destination(target: Path) -> None:
    """Raises: P703 for anything but a new or empty folder."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise _taken(target, "is there already")
    if target.is_dir() and next(target.iterdir(), None) is not None:
        raise _taken(target, "has other files")


@contextmanager
def destination(target: Path) -> Generator[Path]:
    """Yields a folder beside `target`, which takes its place when the block ends without an error.

    Remains of killed runs with the same target are removed first. Raises: P703, P704.
    """
    target = Path(os.path.abspath(target))
    check_destination(target)
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(_workspace(target))
        except OSError as error:
            raise unwritable(target, error) from error
        yield work
        try:
            flush(*_files(work), *(path for path in work.rglob("*") if path.is_dir()), work)
            publish(work, target)
        except OSError as error:
            raise unwritable(target, error) from error


def publish(work: Path, target: Path) -> None:
    check_destination(target)
    os.rename(work, target)  # of an empty folder takes its place
    flush(target.parent)


@contextmanager
def _workspace(target: Path) -> Generator[Path]:
    with ExitStack() as stack:
        with lock(target.parent):
            for path in list(_dead(target)):
                shutil.rmtree(path, ignore_errors=True)
            work = target.parent / f"{PREFIX}{target.name}-{secrets.token_hex(4)}"
            work.mkdir()
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            stack.enter_context(lock(work))
        yield work


def _dead(target: Path) -> Iterable[Path]:
    """Folders of merges into `target` whose process is gone. Its parent is locked."""
    pattern = re.compile(rf"{re.escape(PREFIX + target.name)}-[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError), lock(path, patience=0) as locked:
                if locked:
                    yield path


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def unwritable(target: Path, error: OSError) -> PeftcError:
    """P704."""
    message = f"{target} cannot be written: {error.strerror or error}"
    return PeftcError(Diagnostic("P704", message, notes=("nothing was left there",)))


def _taken(target: Path, reason: str) -> PeftcError:
    help_ = "name a new folder, or remove this one: nothing is replaced"
    return PeftcError(Diagnostic("P703", f"{target} {reason}", help=help_))
