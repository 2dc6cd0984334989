"""Saving what was trained, with all that is needed to put it back."""

from __future__ import annotations

from importlib.metadata import version
from os import PathLike
from pathlib import Path

from torch import nn

from peftc.compiler import parameters
from peftc.weights.adapter import Adapter
from peftc.weights.base import base_of
from peftc.weights.collapse import stored_spec, stored_tensors
from peftc.weights.compiled import compiled, require_values
from peftc.weights.files import listing, write


def save(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Saves what a compiled model has trained: `adapter.safetensors` and `adapter.json`. The base is not saved.

    Tensors are named `<edit>/<site>/<form>.<parameter>`, base parameters that `train` unfroze `<edit>/<dotted name>`.
    Reparametrised prefixes are saved as the rows they make, unless they have `keep=true`. Both files are there afterwards,
    or what was there before.

    Args: `directory`: a new one, an empty one, or one with an adapter, which is replaced.
    Raises: P410 (not compiled), P526 (not there), P527 (no weights), P528 (prefix without rows), P529 (switched off).
    """
    record = compiled(model)
    require_values(parameters(model))
    spec, tensors, base = stored_spec(record.spec), stored_tensors(model, record), base_of(model, record)

    def describe(sha256: str) -> Adapter:
        return Adapter(
            peftc=version("peftc"),
            spec=spec,
            source=record.spec,
            plan=record.plan,
            base=base,
            seed=record.seed,
            tensors=listing(tensors),
            sha256=sha256,
        )

    write(Path(directory), tensors, describe)
    return Path(directory)
