"""Reads and writes the files of an adapter: its tensors, and `adapter.json`, which names them."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from math import prod
from os import PathLike
from pathlib import Path
from time import time
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from peftc.adapters.base import digest_of, dtype_name
from peftc.adapters.metadata import METADATA, TENSORS, TENSORS_NAME, Adapter, StoredTensor, parse_adapter, tensors_name
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
from peftc.filesystem.bounded_read import check_path, open_regular, read_regular
from peftc.syntax.lexer import is_text

LARGEST = 256_000_000  # bytes of the description
HEADER = 100_000_000  # bytes that safetensors allows for its header
_ATTEMPTS = 10  # an adapter may be replaced while it is read
FOREIGN_CONFIG = "adapter_config.json"  # of an adapter of PEFT or AdapterHub
_IMPORT = "`peftc.import_adapter(source, output)` writes it as one of peftc's, which `load` reads"
OLD = f"old-{METADATA}"
RECENT = 3600.0  # seconds; without a lock, younger files may belong to a running writer
_OURS = (re.compile(TENSORS_NAME), re.compile(rf"(old-)?{re.escape(METADATA)}|old-{re.escape(TENSORS)}"))
_WRITTEN = (*_OURS, re.compile(r"\.tmp[A-Za-z0-9]{6}"))  # the last is a temporary file of safetensors


def listing(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    return {n: StoredTensor(shape=tuple(t.shape), dtype=dtype_name(t)) for n, t in sorted(tensors.items())}


def path_of(directory: str | PathLike[str]) -> Path:
    """Raises: P545 for anything but a path, P026 for a character that paths cannot have."""
    if isinstance(directory, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        check_path(directory)
        return Path(directory)
    if isinstance(directory, nn.Module):
        message = f"a directory is a path, not a module, {type(directory).__name__}"
        help_ = "write `peftc.load(directory, model)`, `peftc.save(model, directory)`"
        raise PeftcError(Diagnostic("P545", message, help=help_))
    raise PeftcError(Diagnostic("P545", f"a directory is a path, not {directory!r}", help="give one path, as a text"))


def require_module(model: object, directory: object, task: str, function: str) -> None:
    """Raises: P545 for anything but a module, such as the directory in its place."""
    if not isinstance(model, nn.Module):
        message = f"an adapter is {task} a module, not a {type(model).__name__}"
        is_swapped = isinstance(directory, nn.Module)
        help_ = (
            f"the directory comes first: `peftc.{function}(directory, model)`"
            if is_swapped
            else "build the model first"
        )
        raise PeftcError(Diagnostic("P545", message, help=help_))


def read(directory: Path, check: Callable[[Adapter], object] = bool) -> tuple[Adapter, dict[str, Tensor]]:
    """The description and the tensors (on the CPU) of an adapter, which may be replaced meanwhile.

    Args: `check`: called with the description, before its tensors are read.
    Raises: P026, P027 (no regular file, too large), P520 (missing), P521 (damaged), P522 (newer).
    """
    text = _description(directory)
    for _ in range(_ATTEMPTS):
        try:
            return _read_tensors(directory, parse_adapter(text), check)
        except PeftcError:
            if (again := _description(directory)) == text:
                raise
            text = again
    return _read_tensors(directory, parse_adapter(text), check)


def read_description(directory: Path) -> Adapter:
    """What `adapter.json` says. Raises: as `read`."""
    return parse_adapter(_description(directory))


def _description(directory: Path) -> str:
    try:
        return read_regular(directory / METADATA, LARGEST).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(f"{METADATA} is not text", f"{error}") from error
    except OSError as error:
        raise _missing(directory, error) from error


def _read_tensors(
    directory: Path, adapter: Adapter, check: Callable[[Adapter], object]
) -> tuple[Adapter, dict[str, Tensor]]:
    path = directory / adapter.file
    if adapter.weights_digest and adapter.weights_digest.sha256 != digest_of(adapter.base.tensors).sha256:
        raise _damaged(f"the samples of the base in {METADATA} do not match their digest")
    limit = size_limit(adapter)
    check(adapter)
    try:
        with open_regular(path, limit) as file:
            data = file.read()  # once: the bytes that are hashed are those that are loaded
        if hashlib.sha256(data).hexdigest() != adapter.sha256:
            raise _damaged(f"{path.name} is not the file that {METADATA} describes", "its sha256 differs")
        tensors = load(data)
    except OSError as error:
        raise _missing(directory, error) from error
    except SafetensorError as error:
        raise _damaged(f"{path.name} is not a safetensors file", f"{error}") from error
    if listing(tensors) != adapter.tensors:
        both = (adapter.tensors, listing(tensors))
        expected, actual = ({n: f"{t.dtype} {list(t.shape)}" for n, t in listed.items()} for listed in both)
        names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)][:3]
        notes = [f"`{n}`: {expected.get(n, 'nothing')} listed, {actual.get(n, 'nothing')} there" for n in names]
        raise _damaged(f"{path.name} has other tensors than {METADATA} lists", *notes)
    return adapter, tensors


def size_limit(adapter: Adapter) -> int:
    """The bytes of the listed tensors and a header. Raises: P521 for an unknown dtype."""
    sizes: list[int] = []
    for name, tensor in adapter.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise _damaged(f"{METADATA} lists `{name}` with an unknown dtype", f"`{tensor.dtype}`")
        sizes.append(prod(tensor.shape) * dtype.itemsize)
    return sum(sizes) + HEADER


def listed_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """The listed tensors without values. Raises: P521 for an impossible size."""
    try:
        listed = adapter.tensors.items()
        return {n: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for n, t in listed}
    except (RuntimeError, OverflowError, TypeError) as error:
        raise _damaged(f"{METADATA} lists a tensor of an impossible size", f"{error}".partition("\n")[0]) from error


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _missing(directory: Path, error: OSError) -> PeftcError:
    if is_text(str(directory)):
        message = "this is the text of a spec, not a folder with an adapter"
        return PeftcError(Diagnostic("P520", message, help="compile it: `peftc.compile(spec, model)`"))
    is_foreign = os.path.exists(directory / FOREIGN_CONFIG)  # False for a path that the system refuses
    help_ = f"it has {FOREIGN_CONFIG} of PEFT or AdapterHub: {_IMPORT}" if is_foreign else None
    return PeftcError(Diagnostic("P520", f"there is no saved adapter at {directory}", notes=(f"{error}",), help=help_))


def _damaged(message: str, *notes: str) -> PeftcError:
    return PeftcError(Diagnostic("P521", message, notes=notes, help="save the adapter again, or fetch it again"))


def write(
    target: Path, tensors: Mapping[str, Tensor], describe: Callable[[str], Adapter], *, beside: bool = False
) -> None:
    """Writes an adapter into a new or empty directory, or replaces another adapter.

    At every moment the directory loads as the old or the new adapter, even if the process is
    killed. Files of killed writers are removed afterwards.
    Args: `describe`: makes the description from the sha256 of the tensors; `beside`: the directory
    may have other files.
    Raises: P526 for any other directory, or if the file system refuses; it is unchanged then.
    """
    if not beside or not target.is_dir():
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
    """Removes files that peftc certainly wrote, if it can, and that no description names."""
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
