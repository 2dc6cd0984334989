"""Weights: from a local folder or the hub cache, safetensors only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import check_regular
from peftc.models.configs import error_summary
from peftc.models.resolve import ModelSource, resolve

_SAFE = ("model.safetensors", "model.safetensors.index.json")
_ENDINGS = (".json", ".safetensors", ".txt", ".model")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def load_model(name: str | ModelSource, dtype: torch.dtype | None = None) -> nn.Module:
    """The model with its weights, in eval mode, in the checkpoint's dtype unless another is given.

    The class is the one that planning by the same name uses. Pickled checkpoints are not read. A configuration alone gives
    a model of random weights.

    Raises: P026 (something else than a file), P501–P504 as `resolve`, P505 (weights missing or not in safetensors), P508 (they do not fit the configuration).
    """
    source = name if isinstance(name, ModelSource) else resolve(name)
    if source.module is not None:
        return source.module
    if source.kind == "config":
        assert source.model_class is not None
        assert source.config is not None
        return source.model_class(source.config).eval()
    if source.folder:
        _check_files(source.folder)
    if missing := _missing(source):
        raise PeftcError(missing)
    assert source.model_class is not None
    where = str(source.folder) if source.folder else source.id
    try:
        with paused_gc():
            loaded = source.model_class.from_pretrained(
                where, dtype=dtype or "auto", use_safetensors=True, trust_remote_code=source.own_code
            )
    except OSError as error:
        raise PeftcError(_no_weights(source, error_summary(error))) from error
    except Exception as error:  # shapes that differ, a truncated file: each library raises its own
        message = f"the weights of {source.id} do not make a {source.model_class.__name__}"
        raise PeftcError(Diagnostic("P508", message, notes=(error_summary(error),))) from error
    return cast(nn.Module, loaded.eval())


def _check_files(folder: Path) -> None:
    """Raises: P026 where something else than a regular file has a name that transformers may open."""
    for path in folder.iterdir():
        if path.suffix in _ENDINGS and path.exists():
            check_regular(path, path.stat())


def load_or_initialize(source: ModelSource, seed: int) -> tuple[nn.Module, str]:
    """The model with its weights or, where there are none, with random ones; and which of the two.

    Raises: as `load_model`, but for P505.
    """
    try:
        return load_model(source), "its weights"
    except PeftcError as error:
        if source.model_class is None or [d.code for d in error.diagnostics] != ["P505"]:
            raise
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cast(nn.Module, source.model_class(cast(Any, source.config)).eval())
    return model, f"random weights, seed {seed}"


def _missing(source: ModelSource) -> Diagnostic | None:
    # Asked beforehand: what transformers says of a missing file sends the reader to the network.
    if source.kind in ("config.json", "config"):
        return _no_weights(source, "a configuration has none")
    if not any(_lies(source, file) for file in _SAFE):
        if any(_lies(source, file) for file in _PICKLED):
            return _no_weights(
                source, "there are only pickled weights (.bin), which are not read because loading runs them"
            )
        if source.folder:
            return _no_weights(source, f"`{source.folder}` has neither {' nor '.join(_SAFE)}")
        if constants.HF_HUB_OFFLINE:
            return _no_weights(
                source, "they are not in the hub cache, and the hub was not asked: HF_HUB_OFFLINE is set"
            )
    return None


def _lies(source: ModelSource, file: str) -> bool:
    if source.folder:
        return (Path(source.folder) / file).is_file()
    return isinstance(cast(Any, try_to_load_from_cache(source.id, file)), str)


def _no_weights(source: ModelSource, reason: str) -> Diagnostic:
    return Diagnostic(
        "P505",
        f"the weights of {source.id} are missing",
        notes=(reason,),
        help="give a folder with config.json and model.safetensors; planning needs no weights",
    )
