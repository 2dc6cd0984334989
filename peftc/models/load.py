"""Loads models with their weights, from a local folder or the hub cache, safetensors only."""

from __future__ import annotations

from typing import Any, cast

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import check_regular
from peftc.models.configs import error_summary, paused_gc
from peftc.models.resolve import ModelSource

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_SUFFIXES = (".json", ".safetensors", ".txt", ".model")  # of files that transformers may open


def load_model(source: ModelSource) -> nn.Module:
    """The model with its weights, in eval mode and in the checkpoint's dtype.

    Its class is the one that planning by the same name uses. A configuration alone gives random
    weights.
    Raises: P026 (not a regular file), P505 (weights are missing or not in safetensors), P508 (they
        do not fit the configuration).
    """
    if source.module is not None:
        return source.module
    cls = source.model_class
    assert cls is not None
    if source.kind == "config":
        assert source.config is not None
        return cls(source.config).eval()
    for path in source.folder.iterdir() if source.folder else ():
        if path.suffix in _SUFFIXES and path.exists():
            check_regular(path, path.stat())
    if reason := _why_missing(source):
        raise PeftcError(_no_weights(source, reason))
    path = str(source.folder) if source.folder else source.id
    try:
        with paused_gc():
            model = cls.from_pretrained(path, dtype="auto", use_safetensors=True, trust_remote_code=source.own_code)
    except OSError as error:
        raise PeftcError(_no_weights(source, error_summary(error))) from error
    except Exception as error:  # other shapes, a truncated file: each library raises its own
        message = f"the weights of {source.id} do not make a {cls.__name__}"
        raise PeftcError(Diagnostic("P508", message, notes=(error_summary(error),))) from error
    return cast(nn.Module, model.eval())


def load_or_initialize(source: ModelSource, seed: int) -> tuple[nn.Module, str]:
    """The model, and what weights it has: its own, or random ones in place of P505."""
    try:
        return load_model(source), "its weights"
    except PeftcError as error:
        if source.model_class is None or [d.code for d in error.diagnostics] != ["P505"]:
            raise
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cast(nn.Module, source.model_class(cast(Any, source.config)).eval())
    return model, f"random weights, seed {seed}"


def _why_missing(source: ModelSource) -> str | None:
    # Checked before loading: what transformers says of a missing file sends the reader to the
    # network.
    if source.kind == "config.json":
        return "a configuration has none"
    if any(_exists(source, file) for file in _SAFETENSORS):
        return None
    if any(_exists(source, file) for file in _PICKLED):
        return "there are only pickled weights (.bin), which are not read because loading them runs code"
    if source.folder:
        return f"`{source.folder}` has neither {' nor '.join(_SAFETENSORS)}"
    return "they are not in the hub cache, and HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None


def _exists(source: ModelSource, file: str) -> bool:
    if source.folder:
        return (source.folder / file).is_file()
    return isinstance(cast(Any, try_to_load_from_cache(source.id, file)), str)


def _no_weights(source: ModelSource, reason: str) -> Diagnostic:
    return Diagnostic(
        "P505",
        f"the weights of {source.id} are missing",
        notes=(reason,),
        help="give a folder with config.json and model.safetensors; planning needs no weights",
    )
