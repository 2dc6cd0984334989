"""The files of a PEFT adapter: adapter_config.json, and its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peftc.adapters.metadata import METADATA
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import check_regular, open_regular, read_regular
from peftc.merging.destination import destination, unwritable

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FILES = (CONFIG, TENSORS, PICKLED)
PREFIX = "base_model.model."
_LARGEST_CONFIG = 64_000_000  # bytes
_LARGEST = 200_000_000_000  # bytes of tensors


def write(target: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a new folder, complete or not at all. Raises: P703, P704."""
    write_files(target, {CONFIG: config}, {TENSORS: tensors})


def write_files(
    target: Path, configs: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Configurations and tensors by the names of their files. Raises: P703, P704."""
    with destination(target) as work:
        try:
            for file, config in configs.items():
                text = json.dumps(dict(sorted(config.items())), indent=2, ensure_ascii=False)
                (work / file).write_text(f"{text}\n", encoding="utf-8")
            for file, own in tensors.items():
                plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(own.items())}
                save_file(plain, work / file, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise unwritable(target, error if isinstance(error, OSError) else OSError(str(error))) from error


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object. Raises: P026, P027, P803."""
    try:
        data: Any = json.loads(read_regular(path, _LARGEST_CONFIG))
    except OSError as error:
        if (path.parent / METADATA).exists():
            help_ = "it is compiled as it is: `peftc.load(directory, model)`"
            raise PeftcError(Diagnostic("P803", f"peftc wrote the adapter in {path.parent}", help=help_)) from error
        raise damaged(f"there is no {path.name} in {path.parent}", f"{error}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path} is not JSON", f"{error}") from error
    if not isinstance(data, dict):
        raise damaged(f"{path} is no JSON object")
    return cast(dict[str, Any], data)


def read_tensors(folder: Path, safe: str, pickled: str) -> dict[str, Tensor]:
    """The tensors of a folder; of a pickle only where it has nothing but tensors.

    Raises: P026, P027, P803.
    """
    path = folder / safe
    try:
        if path.exists():
            check_regular(path, path.stat())
            return load_file(path)
        path = folder / pickled
        if not path.exists():
            raise damaged(f"{folder} has neither {safe} nor {pickled}")
        with open_regular(path, _LARGEST) as file:
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True)
    except PeftcError:
        raise
    except SafetensorError as error:
        raise damaged(f"{path} is not a safetensors file", f"{error}") from error
    except Exception as error:  # unpickling raises whatever it meets
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise damaged(f"{path} cannot be read as tensors alone", summary) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in cast(dict[Any, Any], loaded).items()
    ):
        raise damaged(f"{path} has other things than tensors")
    return cast(dict[str, Tensor], loaded)


def damaged(message: str, *notes: str) -> PeftcError:
    return PeftcError(Diagnostic("P803", message, notes=notes))
