"""Writes an adapter: first its tensors under a new name, then `adapter.json`, which names them."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from peftc.adapters.files import LARGEST, sha256_of
from peftc.adapters.metadata import METADATA, TENSORS, TENSORS_NAME, Adapter, tensors_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.atomic import (
    dead_workspaces,
    flush,
    is_workspace,
    lock,
    remove_workspace,
    target_folder,
    workspace,
)
from peftc.filesystem.bounded_read import read_regular

OLD = f"old-{METADATA}"
RECENT = 3600.0  # seconds; without a lock, younger files may belong to a running writer
_OURS = (re.compile(TENSORS_NAME), re.compile(rf"(old-)?{re.escape(METADATA)}|old-{re.escape(TENSORS)}"))
_WRITTEN = (*_OURS, re.compile(r"\.tmp[A-Za-z0-9]{6}"))  # the last is a temporary file of safetensors


def write(target: Path, tensors: Mapping[str, Tensor], describe: Callable[[str], Adapter]) -> None:
    """Writes an adapter into a new or empty directory, or replaces another adapter.

    At every moment the directory loads as the old or the new adapter, even if the process is
    killed. Files of killed writers are removed afterwards.
    Args: `describe`: makes the description from the sha256 of the tensors.
    Raises: P526 for any other directory, or if the file system refuses; then the directory is
        unchanged.
    """
    _check_target(target)
    try:
        with target_folder(target), workspace(target) as work:
            path = work / TENSORS
            save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, path, {"format": "pt"})
            adapter = describe(sha256_of(path))
            (work / METADATA).write_text(adapter.model_dump_json(indent=2) + "\n", encoding="utf-8")
            shutil.copymode(work / METADATA, path)
            path = path.rename(work / adapter.file)
            flush(path, work / METADATA)
            with lock(target) as held:
                _publish(work, target, adapter.file)
                _clean(target, work, held)
    except (OSError, SafetensorError) as error:
        raise PeftcError(Diagnostic("P526", f"the adapter cannot be saved at {target}", notes=(f"{error}",))) from error


def _check_target(target: Path) -> None:
    try:
        is_adapter = {"format_version", "peftc", "sha256"} <= _json(target / METADATA).keys()
        if not target.exists() or (target.is_dir() and (is_adapter or _is_unfinished(target))):
            return
    except OSError as error:
        raise PeftcError(Diagnostic("P526", f"{target} cannot be read", notes=(f"{error}",))) from error
    kind = "is a directory of other things" if target.is_dir() else "is a file"
    raise PeftcError(Diagnostic("P526", f"{target} {kind}", help="name a new directory, or remove this one"))


def _is_unfinished(target: Path) -> bool:
    """Whether a directory is empty, or has only files of a writer that was killed."""
    paths = list(target.iterdir())
    interrupted = any(map(is_workspace, paths))
    others = [path for path in paths if not is_workspace(path)]
    is_ours = all(_OURS[0].fullmatch(path.name) and path.is_file() for path in others)
    return is_ours and (interrupted or all(path.name != TENSORS for path in others))


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_regular(path, LARGEST))
    except (PeftcError, OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], data) if isinstance(data, dict) else {}


def _publish(work: Path, target: Path, name: str) -> None:
    if (target / METADATA).exists():
        shutil.copyfile(target / METADATA, work / OLD)  # names the old tensors until they are removed
    try:
        os.replace(work / name, target / name)
        flush(target)
        os.replace(work / METADATA, target / METADATA)
    except BaseException:
        if _json(target / METADATA).get("file") != name:
            with suppress(OSError):
                (target / name).unlink()
        raise
    flush(target)


def _clean(target: Path, work: Path, held: bool) -> None:
    """Removes files that no description names, if peftc certainly wrote them.

    Files that cannot be removed are left to the next writer.
    """
    with suppress(OSError):
        dead = list(dead_workspaces(target)) if held else []
        for path in _unused(target, [work, *dead]):
            if held or path.stat().st_mtime < time() - RECENT:
                path.unlink()
        for path in dead:
            remove_workspace(path, _WRITTEN)


def _unused(target: Path, workspaces: list[Path]) -> Iterator[Path]:
    """Unnamed files of tensors whose sha256 is in their name or a replaced description."""
    descriptions = [_json(path) for work in workspaces for path in sorted(work.rglob(f"*{METADATA}"))]
    replaced = {str(data.get("sha256")) for data in descriptions}
    named = _json(target / METADATA).get("file", TENSORS)
    for path in sorted(target.iterdir()):
        if path.name != named and _OURS[0].fullmatch(path.name) and path.is_file() and not path.is_symlink():
            digest = sha256_of(path)
            if path.name == tensors_name(digest) or (path.name == TENSORS and digest in replaced):
                yield path
