"""The files of an adapter: written whole or not at all, and believed only where they agree with each other."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.weights.adapter import METADATA, TENSORS, Adapter, StoredTensor, parse_adapter

FILES = (TENSORS, METADATA)


def listing(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes of tensors."""
    return {
        name: StoredTensor(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in sorted(tensors.items())
    }


def path_of(directory: str | PathLike[str]) -> Path:
    """Raises: P545 where it is no path."""
    if isinstance(directory, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        return Path(directory)
    raise PeftcError(Diagnostic("P545", f"a directory is a path, not {directory!r}", help="give one path, as a text"))


# Writing -------------------------------------------------------------------------------------------------------------


def write(target: Path, tensors: Mapping[str, Tensor], describe: Callable[[str], Adapter]) -> None:
    """Writes an adapter into a new or empty directory, or over another one. `describe` is given the tensors' sha256.

    Raises: P526 for any other directory, or where the file system refuses; then what was there is there.
    """
    _check_target(target)
    try:
        above = target if target.is_dir() else target.parent
        above.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".peftc-", dir=above) as temporary:
            made = Path(temporary) / "adapter"
            made.mkdir()
            save_file({n: t.cpu().contiguous().clone() for n, t in tensors.items()}, made / TENSORS, {"format": "pt"})
            text = describe(_sha256(made / TENSORS)).model_dump_json(indent=2)
            (made / METADATA).write_text(text + "\n", encoding="utf-8")
            for name in FILES:
                _flush(made / name)
            if above is target:
                _exchange(made, target)
            else:
                os.replace(made, target)
    except OSError as error:
        raise PeftcError(Diagnostic("P526", f"the adapter cannot be saved at {target}", notes=(f"{error}",))) from error


def _check_target(target: Path) -> None:
    try:
        if not target.exists() or (target.is_dir() and (not any(target.iterdir()) or _is_adapter(target))):
            return
    except OSError as error:
        raise PeftcError(Diagnostic("P526", f"{target} cannot be looked at", notes=(f"{error}",))) from error
    what = "is a directory of other things" if target.is_dir() else "is a file"
    raise PeftcError(Diagnostic("P526", f"{target} {what}", help="name a new directory, or remove this one"))


def _is_adapter(target: Path) -> bool:
    """Whether peftc saved an adapter here, of whatever version."""
    try:
        data = json.loads((target / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"format_version", "peftc", "sha256"} <= data.keys()


def _exchange(made: Path, target: Path) -> None:
    """Puts new files in the place of old ones; the description goes first and comes last, so that no mixture loads."""
    old = [name for name in reversed(FILES) if (target / name).exists()]
    moved: list[str] = []
    placed: list[str] = []
    try:
        for name in old:
            os.replace(target / name, made / f"old-{name}")
            moved.append(name)
        for name in FILES:
            os.replace(made / name, target / name)
            placed.append(name)
    except BaseException:
        for name in placed:
            (target / name).unlink()
        for name in reversed(moved):
            os.replace(made / f"old-{name}", target / name)
        raise


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Reading -------------------------------------------------------------------------------------------------------------


def read(directory: Path) -> tuple[Adapter, dict[str, Tensor]]:
    """The description and the tensors (on the CPU) of a saved adapter.

    Raises: P520 where a file is missing, P521 where they are damaged, P522 for a newer format.
    """
    try:
        adapter = parse_adapter((directory / METADATA).read_text(encoding="utf-8"))
        digest = _sha256(directory / TENSORS)
        if digest != adapter.sha256:
            raise _damaged(f"{TENSORS} is not the file that {METADATA} describes", "its sha256 is another one")
        tensors = load_file(directory / TENSORS)
    except UnicodeDecodeError as error:
        raise _damaged(f"{METADATA} is not text", f"{error}") from error
    except OSError as error:
        raise PeftcError(
            Diagnostic("P520", f"there is no saved adapter at {directory}", notes=(f"{error}",))
        ) from error
    except SafetensorError as error:
        raise _damaged(f"{TENSORS} is not a safetensors file", f"{error}") from error
    if listing(tensors) != adapter.tensors:
        raise _damaged(f"{TENSORS} has other tensors than {METADATA} lists", *_unlike(adapter.tensors, tensors))
    return adapter, tensors


def _unlike(listed: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> list[str]:
    there = listing(tensors)
    names = [name for name in {**listed, **there} if listed.get(name) != there.get(name)]
    return [f"`{name}`: {_said(listed.get(name))} listed, {_said(there.get(name))} there" for name in names[:3]]


def _said(tensor: StoredTensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _damaged(message: str, *notes: str) -> PeftcError:
    return PeftcError(Diagnostic("P521", message, notes=notes, help="save the adapter again, or fetch it again"))
