"""Where the base of an adapter comes from: its name, its commit on the hub, and its class."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast, get_args

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from torch import nn

from peftc.adapters.metadata import Origin

LIBRARIES: tuple[str, ...] = get_args(Origin.model_fields["library"].annotation)


def origin_of(model: nn.Module) -> Origin | None:
    """The origin of a model; None if its class is not of a library that loads models."""
    cls = _own_class(model)
    library = cls.__module__.partition(".")[0]
    if library not in LIBRARIES:
        return None
    name, revision = _name(model), None
    if name and os.path.isdir(name):
        name = absolute_name(name)
    elif name:
        revision = getattr(getattr(model, "config", None), "_commit_hash", None) or _cached_revision(name)
    return Origin(name=name, revision=revision, library=cast(Any, library), architecture=cls.__name__)


def absolute_name(name: str) -> str:
    """The path of a folder from the root of the file system; a hub id as it is."""
    return str(Path(name).resolve()) if os.path.isdir(name) else name


def _own_class(model: nn.Module) -> type:
    """The class of a model, without what peftc and FSDP2 put in front of it."""
    ours = {"_peftc_under", "_peftc_kind"}
    classes = (cls for cls in type(model).__mro__ if not vars(cls).keys() & ours)
    return next(cls for cls in classes if not cls.__module__.startswith("torch.distributed"))


def _name(model: nn.Module) -> str | None:
    config: Any = getattr(model, "config", None)
    name: Any = getattr(config, "_name_or_path", None)
    return name if isinstance(name, str) and name else None


def _cached_revision(name: str) -> str | None:
    """The commit of a hub id, if the cache has only one. Newer transformers do not record it."""
    try:
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
        revisions = [path.name for path in folder.iterdir()]
    except (OSError, ValueError):
        return None
    return revisions[0] if len(revisions) == 1 else None
