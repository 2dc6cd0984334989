"""A folder of generated files: `.peftc.json` in it has the hash of each, so that no file of the user's is overwritten or removed."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.filesystem.atomic import (
    dead_workspaces,
    flush,
    is_workspace,
    lock,
    remove_workspace,
    target_folder,
    workspace,
)

MARKER = ".peftc.json"
_LARGEST = 2**20  # bytes of a marker
_NAMES = (
    re.compile(r"\.peftc\.json|plan\.json|spec\.peft|README\.md|forward_\w+\.py"),
)  # of what a workspace may hold

_Name = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00.][^/\\\x00]*$")]
_Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Marker(BaseModel):
    """What peftc has written into a folder: sha256 by name. `pending` is what a run that has not ended is about to write."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal["1.0"] = "1.0"
    peftc: str
    files: dict[_Name, _Sha256]
    pending: dict[_Name, _Sha256] = Field(default_factory=dict)

    def wrote(self, name: str, digest: str | None) -> bool:
        """Whether a file is as peftc wrote it."""
        return digest is not None and digest in (self.files.get(name), self.pending.get(name))


@dataclass(frozen=True)
class FolderChanges:
    """What became of a folder: files that were written, those of an earlier run that were removed, and those that stay because
    they were changed.
    """

    folder: Path
    written: tuple[str, ...]
    removed: tuple[str, ...]
    modified: tuple[str, ...]


@dataclass(frozen=True)
class _Change:
    """What will be done to a folder."""

    unchanged: dict[str, str]  # files that are as peftc wrote them
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def write_folder(target: Path, files: Mapping[str, str], force: bool = False) -> FolderChanges:
    """Writes texts by their names into a folder that is new, empty, or was written by this function. A run that was killed is
    completed by the next one.

    Args: `force`: overwrite files that were changed since they were written. Files that peftc did not write are never touched.
    Raises: P420 for any other folder, or where the file system refuses; P550 for a changed file, P551 for a file that is in the
    way. Then nothing has been changed.
    """
    try:
        contents = {name: text.encode("utf-8", "backslashreplace") for name, text in files.items()}
        new = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        with lock(target) if target.is_dir() else nullcontext():  # another writer may be at work
            _planned(target, new, force)
        with target_folder(target), workspace(target) as work:
            for name, content in contents.items():
                (work / name).write_bytes(content)
            flush(*(work / name for name in files))
            with lock(target) as held:
                change = _planned(target, new, force)
                _publish(target, work, new, change)
                for path in list(dead_workspaces(target)) if held else ():
                    remove_workspace(path, _NAMES)
    except OSError as error:
        raise PeftcError(Diagnostic("P420", f"{target} cannot be written: {error.strerror or error}")) from error
    return FolderChanges(target, tuple(sorted(files)), change.removed, change.kept)


def _planned(target: Path, files: Mapping[str, str], force: bool) -> _Change:
    """What is to be done where files with these hashes are to be. Raises: P420, P550, P551."""
    marker = _marker(target)
    digests = {name: _digest(target / name) for name in {**marker.files, **marker.pending, **files}}
    unchanged = {name: digest for name, digest in digests.items() if digest and marker.wrote(name, digest)}
    present = [name for name in files if os.path.lexists(target / name) and digests[name] != files[name]]
    ours = {*marker.files, *marker.pending}
    changed = [name for name in present if name in ours and name not in unchanged]
    foreign = [name for name in present if name not in ours or (target / name).is_dir()]
    if foreign:
        message = f"{target} has {join_names(foreign)}, which peftc did not write"
        raise PeftcError(Diagnostic("P551", message, help="move it away, or choose another directory for -o"))
    if changed and not force:
        message = f"{join_names(changed)} in {target} {_were(changed)} changed since peftc wrote {_them(changed)}"
        raise PeftcError(Diagnostic("P550", message, help="`--force` overwrites; nothing has been written"))
    stale = [name for name in digests if name not in files]
    removed = tuple(sorted(name for name in stale if name in unchanged))
    kept = tuple(sorted(name for name in stale if name not in unchanged and os.path.lexists(target / name)))
    return _Change(unchanged, removed, kept)


def _were(names: list[str]) -> str:
    return "were" if len(names) > 1 else "was"


def _them(names: list[str]) -> str:
    return "them" if len(names) > 1 else "it"


def _publish(target: Path, work: Path, new: Mapping[str, str], change: _Change) -> None:
    """The marker says what may come before it comes, and what is there when everything is."""
    _mark(target, work, change.unchanged, new)
    for name in new:
        os.replace(work / name, target / name)
    for name in change.removed:
        (target / name).unlink()
    _mark(target, work, new)


def _mark(target: Path, work: Path, files: Mapping[str, str], pending: Mapping[str, str] | None = None) -> None:
    marker = Marker(peftc=version("peftc"), files=dict(sorted(files.items())), pending=dict(pending or {}))
    text = marker.model_dump_json(indent=2, exclude=None if marker.pending else {"pending"}) + "\n"
    (work / MARKER).write_text(text, encoding="utf-8", newline="\n")
    flush(work / MARKER, target)
    os.replace(work / MARKER, target / MARKER)
    flush(target)


def _marker(target: Path) -> Marker:
    """What peftc has written there; nothing, where there is nothing. Raises: P420 for another folder."""
    path = target / MARKER
    if not os.path.lexists(target) or (target.is_dir() and all(map(is_workspace, target.iterdir()))):
        return Marker(peftc="", files={})
    if not target.is_dir():
        raise _refusal(target, "is not a directory")
    if not _is_file(path):
        raise _refusal(target, f"has other files, and no {MARKER} that says which are peftc's")
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError
        return Marker.model_validate_json(path.read_bytes())
    except (ValidationError, ValueError):
        raise _refusal(target, f"has a {MARKER} that peftc did not write") from None


def _refusal(target: Path, what: str) -> PeftcError:
    return PeftcError(Diagnostic("P420", f"{target} {what}", help="choose a new or empty directory for -o"))


def _is_file(path: Path) -> bool:
    """Whether a path is a plain file, and no link to one."""
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if _is_file(path) else None
