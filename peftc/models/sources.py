"""Resolves `--model` and the `model` argument: a name, a path, a config, or a model. Weights are
loaded from a local folder or the hub cache, safetensors only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.diagnostics.activity import activity
from peftc.diagnostics.suggestions import SPEC_FIRST, join_names
from peftc.filesystem.bounded_read import check_regular
from peftc.models import catalogue
from peftc.models.catalogue import Head
from peftc.models.configs import class_of, config_from, from_code, model_class, task_class
from peftc.models.names import (
    Kind,
    Request,
    error_summary,
    has_code,
    local_values,
    read_values,
    split_task,
    with_task,
)
from peftc.modules.module_rows import ModuleRows
from peftc.syntax.lexer import is_text

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")  # of weights
_SUFFIXES = (".json", ".safetensors", ".txt", ".model")  # of files that transformers may open


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that can be planned for."""

    id: str
    kind: Kind
    type: str  # transformers' model type, or the class name of a plain module
    config: PretrainedConfig | None = None
    model_class: type[PreTrainedModel] | None = None  # to build, if the model is no module yet
    module: nn.Module | None = None
    folder: Path | None = None  # where its weights may lie
    untied_head: bool = False  # the configuration's text says `tie_word_embeddings: false`
    own_code: bool = False  # the class comes from the repository's code, which has been run
    request: Request | None = None  # of its cached table: the name and the values of its configuration
    rows: ModuleRows | None = None  # of the modules of `module`, if they are known

    @property
    def checkpoint(self) -> str:
        """The folder or the hub id of its weights: its name without a task."""
        return split_task(self.id)[0]


def resolve(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module, trust_remote_code: bool = False
) -> ModelSource:
    """Resolves a model without reading a weight.

    A string is a folder or a config.json if one exists, else an id in the catalogue, in the hub
    cache, or, unless offline, on the hub, of which only config.json is downloaded. `NAME:TASK` has
    the class of an auto class of transformers: `bert-base-uncased:sequence-classification`.
    Raises: P501 (unknown id), P502 (no such path), P503 (unusable configuration), P504 (needs the
        repository's code), P510 (that code fails), P513 (no model for the task).
    """
    if isinstance(model, nn.Module):
        config: Any = getattr(model, "config", None)
        if not isinstance(config, PretrainedConfig):
            return ModelSource(type(model).__name__, "module", type(model).__name__, module=model)
        return ModelSource(config.name_or_path or config.model_type, "module", config.model_type, config, module=model)
    if isinstance(model, PretrainedConfig):
        name = model.name_or_path or model.model_type
        own_code = trust_remote_code and has_code(vars(model))
        cls = class_of(model, name, name) if own_code else model_class(model, name)
        return ModelSource(name, "config", model.model_type, model, cls, own_code=own_code)
    if not isinstance(model, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        message = f"a model is a module, a config or a name, not a {type(model).__name__}"
        raise PeftcError(Diagnostic("P502", message, help=modules_of(model)))
    name = os.fspath(model)
    if (name and is_text(name)) or name.endswith(".peft"):
        raise PeftcError(Diagnostic("P502", "this is a spec, not a model", help=SPEC_FIRST))
    try:
        return _from_name(name, trust_remote_code)
    except PeftcError as error:  # point at the name
        source = Source("model", name)
        span = Span(0, len(name), 1, 1, 1, len(name) + 1)
        raise PeftcError(replace(d, source=source, span=span) for d in error.diagnostics) from error.__cause__


def modules_of(value: object) -> str | None:
    """What to do with an object that holds models, as pipelines do; None without any."""
    names = [name for name, part in getattr(value, "__dict__", {}).items() if isinstance(part, nn.Module)]
    return f"it holds {join_names(names)}: compile one of these" if names else None


def _from_name(name: str, trust_remote_code: bool) -> ModelSource:
    if not name:
        raise PeftcError(_unknown(name, "the name is empty"))
    if local := local_values(name):
        return _from_values(name, local.kind, local.values, trust_remote_code, local.path, local.head)
    name, task = split_task(name)
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        raise PeftcError(Diagnostic("P502", f"the folder `{name}` has no config.json"))
    if name.endswith(".json") or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise PeftcError(Diagnostic("P502", f"there is no folder or config.json at `{name}`"))
    values = read_values(_hub_config(name))
    return _from_values(with_task(name, task), "hub", values, trust_remote_code)


def _from_values(
    name: str,
    kind: Kind,
    values: Mapping[str, Any],
    trust_remote_code: bool = False,
    path: Path | None = None,
    head: Head | None = None,
) -> ModelSource:
    folder, (id_, task) = path if kind == "folder" else None, split_task(name)
    if trust_remote_code and has_code(values):
        config, cls = from_code(id_, path, task)
        return ModelSource(name, kind, config.model_type, config, cls, folder=folder, own_code=True)
    config, untied = config_from(values, name), values.get("tie_word_embeddings") is False
    cls = model_class(config, id_, head) if task is None else task_class(config, id_, task)
    request = None if kind == "hub" else Request(name, values, head)
    return ModelSource(name, kind, config.model_type, config, cls, folder=folder, untied_head=untied, request=request)


def _hub_config(name: str) -> Path:
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise PeftcError(_unknown(name, "the hub cannot be reached: HF_HUB_OFFLINE is set"))
        return Path(hf_hub_download(name, "config.json"))
    except RemoteEntryNotFoundError as error:
        raise PeftcError(Diagnostic("P502", f"`{name}` on the hub has no config.json")) from error
    except HFValidationError as error:
        raise PeftcError(_unknown(name, "it is not a well-formed hub id")) from error
    except OSError as error:  # every HTTP error of the hub is one
        raise PeftcError(_unknown(name, f"the hub did not return it: {error_summary(error)}")) from error


def _unknown(name: str, reason: str) -> Diagnostic:
    ids = " or ".join(f"`{n}`" for n in catalogue.nearest_ids(name))
    note = "it is neither a folder nor in peftc's catalogue, and its config.json is not in the hub cache"
    help_ = f"{f'did you mean {ids}? Or give' if ids else 'give'} a local folder or the path of a config.json"
    return Diagnostic("P501", f"unknown model `{name}`", notes=(note, reason), help=help_)


def load_model(source: ModelSource) -> nn.Module:
    """The model with its weights (random ones for a configuration alone), in eval mode.

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
    path = str(source.folder) if source.folder else source.checkpoint
    try:
        with activity(f"reading the weights of {source.id}"), paused_gc(promote=True):
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
    with activity(f"drawing weights of {source.id}"), torch.random.fork_rng():
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


def has_local_weights(source: ModelSource) -> bool:
    """Whether the weights are on this machine, in safetensors."""
    named = source.kind not in ("config", "module", "config.json")
    return named and any(_exists(source, file) for file in _SAFETENSORS)


def weights_folder(source: ModelSource) -> Path:
    """The folder with the files of a model: its own, or the hub cache's, after a download.

    Raises: P505 if it has no safetensors.
    """
    if source.kind in ("config", "module"):
        raise PeftcError(_no_weights(source, "it is not the name of a checkpoint"))
    if reason := _why_missing(source):
        raise PeftcError(_no_weights(source, reason))
    if source.folder:
        return source.folder
    try:
        return Path(snapshot_download(source.checkpoint, ignore_patterns=[f"*{suffix}" for suffix in OTHER_FORMATS]))
    except OSError as error:
        raise PeftcError(_no_weights(source, error_summary(error))) from error


def _exists(source: ModelSource, file: str) -> bool:
    if source.folder:
        return (source.folder / file).is_file()
    return isinstance(cast(Any, try_to_load_from_cache(source.checkpoint, file)), str)


def _no_weights(source: ModelSource, reason: str) -> Diagnostic:
    help_ = "give a folder with config.json and model.safetensors; planning needs no weights"
    return Diagnostic("P505", f"the weights of {source.id} are missing", notes=(reason,), help=help_)
