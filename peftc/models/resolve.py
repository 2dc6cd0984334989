"""What `--model` and the `model` argument can be: a name, a path, a config, or a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from peftc.diagnostics import Diagnostic, PeftcError, Source, Span
from peftc.models import catalogue
from peftc.models.catalogue import Head
from peftc.models.configs import config_from, error_summary, model_class, read_values
from peftc.models.remote_code import class_of, from_code, has_code

Kind = Literal["catalogue", "folder", "config.json", "hub", "config", "module"]


@dataclass(frozen=True, eq=False)
class ModelSource:
    """A model that can be planned for. `type` is transformers' model type, or a plain module's class name.

    `model_class` is what to build (None for a module that is already there); `folder` is where its weights may lie.
    `untied_head`: the configuration's text says that the output embedding is a matrix of its own. `own_code`: the class is
    of the code that came with the configuration, which has been run.
    """

    id: str
    kind: Kind
    type: str
    config: PretrainedConfig | None = None
    model_class: type[PreTrainedModel] | None = None
    module: nn.Module | None = None
    folder: Path | None = None
    untied_head: bool = False
    own_code: bool = False


def resolve(
    model: str | os.PathLike[str] | PretrainedConfig | nn.Module, trust_remote_code: bool = False
) -> ModelSource:
    """Finds out what a model is, without reading a weight.

    A string is a folder or a config.json if there is one of that name, else an id of the catalogue, else an id in the hub
    cache, else, unless offline, an id on the hub (only its config.json is fetched).

    Args: `trust_remote_code`: run the code that the configuration names, if it names any.
    Raises: P501 (unknown id), P502 (no such path), P503 (unusable configuration), P504 (needs the repository's code), P510
    (that code fails).
    """
    if isinstance(model, nn.Module):
        return _module(model)
    if isinstance(model, PretrainedConfig):
        name = model.name_or_path or model.model_type
        own_code = trust_remote_code and has_code(vars(model))
        cls = class_of(model, name, name) if own_code else model_class(model, name)
        return ModelSource(name, "config", model.model_type, model, cls, own_code=own_code)
    if not isinstance(model, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        message = f"a model is a module, a config or a name, not a {type(model).__name__}"
        raise PeftcError(Diagnostic("P502", message))
    name = os.fspath(model)
    try:
        return _named(name, trust_remote_code)
    except PeftcError as error:  # all of them are about the name
        source = Source("--model", name)
        span = Span(0, len(name), 1, 1, 1, len(name) + 1)
        raise PeftcError(replace(d, source=source, span=span) for d in error.diagnostics) from error.__cause__


def _module(model: nn.Module) -> ModelSource:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return ModelSource(type(model).__name__, "module", type(model).__name__, module=model)
    return ModelSource(config.name_or_path or config.model_type, "module", config.model_type, config, module=model)


def _named(name: str, trust: bool) -> ModelSource:
    if not name:
        raise PeftcError(_unknown(name, "the name is empty"))
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path / "config.json"):
        values = read_values(path / "config.json")
        return (
            _from_code(name, "folder", path)
            if trust and has_code(values)
            else _from_values(name, "folder", values, path)
        )
    if os.path.isfile(path):
        values = read_values(path)
        return (
            _from_code(name, "config.json", path)
            if trust and has_code(values)
            else _from_values(name, "config.json", values)
        )
    if entry := catalogue.find(name):
        return _from_values(name, "catalogue", {**entry.config, "model_type": entry.model_type}, head=entry.head)
    if os.path.isdir(path):
        raise PeftcError(Diagnostic("P502", f"the folder `{name}` has no config.json"))
    if _is_path(name):
        raise PeftcError(Diagnostic("P502", f"there is no folder or config.json at `{name}`"))
    values = read_values(_hub_config(name))
    return _from_code(name, "hub") if trust and has_code(values) else _from_values(name, "hub", values)


def _from_code(name: str, kind: Kind, path: Path | None = None) -> ModelSource:
    config, cls = from_code(name, path)
    folder = path if kind == "folder" else None
    return ModelSource(name, kind, config.model_type, config, cls, folder=folder, own_code=True)


def _from_values(
    name: str, kind: Kind, values: Mapping[str, Any], folder: Path | None = None, head: Head | None = None
) -> ModelSource:
    config = config_from(values, name)
    untied = values.get("tie_word_embeddings") is False
    cls = model_class(config, name, head)
    return ModelSource(name, kind, config.model_type, config, cls, folder=folder, untied_head=untied)


def _is_path(name: str) -> bool:
    return name.endswith(".json") or name.startswith((".", "~", os.sep)) or name.count("/") > 1


def _hub_config(name: str) -> Path:
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise PeftcError(_unknown(name, "the hub was not asked: HF_HUB_OFFLINE is set"))
        return Path(hf_hub_download(name, "config.json"))
    except RemoteEntryNotFoundError as error:
        raise PeftcError(Diagnostic("P502", f"`{name}` on the hub has no config.json")) from error
    except HFValidationError as error:
        raise PeftcError(_unknown(name, "this is no well-formed hub id")) from error
    except OSError as error:  # every HTTP error of the hub is one
        raise PeftcError(_unknown(name, f"the hub could not give it: {error_summary(error)}")) from error


def _unknown(name: str, reason: str) -> Diagnostic:
    near = catalogue.near(name)
    meant = f"did you mean {' or '.join(f'`{n}`' for n in near)}? Or give" if near else "give"
    return Diagnostic(
        "P501",
        f"unknown model `{name}`",
        notes=(
            "it is not a folder, not in peftc's catalogue and its config.json is not in the hub cache",
            reason,
        ),
        help=f"{meant} a local folder or the path of a config.json",
    )
