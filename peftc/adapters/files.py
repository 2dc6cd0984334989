"""Reads the files of an adapter, and checks that they agree with each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from peftc.adapters.metadata import METADATA, Adapter, StoredTensor, parse_adapter
from peftc.adapters.weight_access import dtype_name
from peftc.adapters.weight_sample import digest_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import check_path, open_regular, read_regular

LARGEST = 256_000_000  # bytes of the description
HEADER = 100_000_000  # bytes that safetensors allows for its header
_ATTEMPTS = 10  # an adapter may be replaced while it is read


def listing(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    return {n: StoredTensor(shape=tuple(t.shape), dtype=dtype_name(t)) for n, t in sorted(tensors.items())}


def path_of(directory: str | PathLike[str]) -> Path:
    """Raises: P545 for anything but a path, P026 for a character that paths cannot have."""
    if isinstance(directory, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        check_path(directory)
        return Path(directory)
    raise PeftcError(Diagnostic("P545", f"a directory is a path, not {directory!r}", help="give one path, as a text"))


def read(directory: Path, check: Callable[[Adapter], object] = bool) -> tuple[Adapter, dict[str, Tensor]]:
    """The description and the tensors (on the CPU) of a saved adapter, which may be replaced
    meanwhile.

    Args: `check`: called with the description, before its tensors are read.
    Raises: P026 and P027 (not a regular file, or too large), P520 (a file is missing), P521
        (damaged), P522 (a newer format).
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
    return PeftcError(Diagnostic("P520", f"there is no saved adapter at {directory}", notes=(f"{error}",)))


def _damaged(message: str, *notes: str) -> PeftcError:
    return PeftcError(Diagnostic("P521", message, notes=notes, help="save the adapter again, or fetch it again"))
