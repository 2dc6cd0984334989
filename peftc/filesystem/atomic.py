"""Atomic writes: locks on folders, temporary workspaces inside them, fsync, and a folder of
generated files. Its `.peftc.json` has their hashes, to protect the user's own files.
"""

import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names

if sys.platform != "win32":
    import fcntl

PREFIX = ".peftc-"
PATIENCE = 60.0  # seconds to wait for another writer
_WORKSPACE = re.compile(rf"{re.escape(PREFIX)}[a-z0-9_]{{8}}")  # the names that tempfile makes of the prefix
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
MARKER = ".peftc.json"
_MAX_BYTES = 2**20  # of a marker
_WORKSPACE_FILES = (re.compile(r"\.peftc\.json|plan\.json|spec\.peft|README\.md|forward_\w+\.(?:py|diff)"),)
_Name = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00.][^/\\\x00]*$")]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


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
    """Locks a folder without a lock file; False if it has no locks. Raises: TimeoutError."""
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
    """Writes a file atomically. One that is there keeps its permissions."""
    descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=target.parent)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        if target.exists():
            shutil.copymode(target, name)
        else:
            os.chmod(name, 0o666 & ~_umask())
        flush(Path(name))
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """The permissions that new files of this process do not have. Reading it is setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class Marker(BaseModel):
    """The content of `.peftc.json`: sha256 by file name. `pending`: files of an unfinished run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal["1.0"] = "1.0"
    peftc: str
    files: dict[_Name, _Sha256]
    pending: dict[_Name, _Sha256] = Field(default_factory=dict)


@dataclass(frozen=True)
class FolderChanges:
    """Written files, and those of an earlier run: removed, or left because they were modified."""

    folder: Path
    written: tuple[str, ...]
    removed: tuple[str, ...]
    modified: tuple[str, ...]


def write_folder(target: Path, files: Mapping[str, str], force: bool = False) -> FolderChanges:
    """Writes texts by name into a new or empty folder, or one that it has written before.

    If a run is killed, the next run completes it. Files that peftc did not write always stay.
    Args: `force`: overwrite files that the user modified.
    Raises, before any change: P420 (no such folder), P550 (a modified file), P551 (in the way).
    """
    try:
        contents = {name: text.encode("utf-8", "backslashreplace") for name, text in files.items()}
        new = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        with lock(target) if target.is_dir() else nullcontext():
            _changes(target, new, force)  # raises errors before a folder is created
        with target_folder(target), workspace(target) as work:
            for name, content in contents.items():
                (work / name).write_bytes(content)
            flush(*(work / name for name in files))
            with lock(target) as locked:
                unchanged, removed, modified = _changes(target, new, force)
                _write_marker(target, work, unchanged, new)  # first: a killed run leaves no unknown file
                for name in new:
                    os.replace(work / name, target / name)
                for name in removed:
                    (target / name).unlink()
                _write_marker(target, work, new)
                for path in list(dead_workspaces(target)) if locked else ():
                    remove_workspace(path, _WORKSPACE_FILES)
    except OSError as error:
        raise PeftcError(Diagnostic("P420", f"{target} cannot be written: {error.strerror or error}")) from error
    return FolderChanges(target, tuple(sorted(files)), removed, modified)


def _changes(
    target: Path, files: Mapping[str, str], force: bool
) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    """Digests of unchanged files, files to remove, and modified ones. Raises: P420, P550, P551."""
    marker, digests = _read_marker(target), dict[str, str | None]()
    for name in {**marker.files, **marker.pending, **files}:
        path = target / name
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest() if _is_file(path) else None
    unchanged = {n: d for n, d in digests.items() if d and d in (marker.files.get(n), marker.pending.get(n))}
    present = [name for name in files if os.path.lexists(target / name) and digests[name] != files[name]]
    own = {*marker.files, *marker.pending}
    modified = [name for name in present if name in own and name not in unchanged]
    foreign = [name for name in present if name not in own or (target / name).is_dir()]
    if foreign:
        message = f"{target} has {join_names(foreign)}, which peftc did not write"
        raise PeftcError(Diagnostic("P551", message, help="move it away, or choose another directory for -o"))
    if modified and not force:
        verb, them = ("were", "them") if len(modified) > 1 else ("was", "it")
        message = f"{join_names(modified)} in {target} {verb} changed since peftc wrote {them}"
        raise PeftcError(Diagnostic("P550", message, help="`--force` overwrites; nothing has been written"))
    stale = sorted(name for name in digests if name not in files)
    removed = tuple(name for name in stale if name in unchanged)
    remaining = tuple(name for name in stale if name not in unchanged and os.path.lexists(target / name))
    return unchanged, removed, remaining


def _write_marker(target: Path, work: Path, files: Mapping[str, str], pending: Mapping[str, str] | None = None) -> None:
    marker = Marker(peftc=version("peftc"), files=dict(sorted(files.items())), pending=dict(pending or {}))
    text = marker.model_dump_json(indent=2, exclude=None if marker.pending else {"pending"}) + "\n"
    (work / MARKER).write_text(text, encoding="utf-8", newline="\n")
    flush(work / MARKER, target)
    os.replace(work / MARKER, target / MARKER)
    flush(target)


def _read_marker(target: Path) -> Marker:
    """The marker of a folder; an empty one for a new or empty folder. Raises: P420."""
    path = target / MARKER
    if not os.path.lexists(target) or (target.is_dir() and all(map(is_workspace, target.iterdir()))):
        return Marker(peftc="", files={})
    if not target.is_dir():
        raise _refusal(target, "is not a directory")
    if not _is_file(path):
        raise _refusal(target, f"has other files, and no {MARKER} that lists those of peftc")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError
        return Marker.model_validate_json(path.read_bytes())
    except (ValidationError, ValueError):
        raise _refusal(target, f"has a {MARKER} that peftc did not write") from None


def _refusal(target: Path, problem: str) -> PeftcError:
    return PeftcError(Diagnostic("P420", f"{target} {problem}", help="choose a new or empty directory for -o"))


def _is_file(path: Path) -> bool:
    """Whether a path is a regular file, not a link to one."""
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)
