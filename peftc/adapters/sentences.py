"""Models of sentence-transformers whose transformer is saved as an adapter."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedModel

from peftc.adapters.checkpoints import CONFIGURATION, INDEX, WEIGHTS
from peftc.adapters.metadata import METADATA
from peftc.diagnostics import Diagnostic, PeftcError

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
CLASSES = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")
_WEIGHTS = ["model*.safetensors", "model*.safetensors.index.json"]


def load_sentence_model(
    folder: Path, place: str, revision: str | None, options: Mapping[str, Any]
) -> tuple[nn.Module, PreTrainedModel]:
    """The model of a folder of sentence-transformers with the base's weights, and its transformer.

    `place`: the folder or hub id of the base. Raises: P585 for another class; what the libraries
    raise.
    """
    values: dict[str, Any] = {}
    if (folder / SETTINGS).is_file():
        values = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    name = values.get("model_type") or CLASSES[0]
    if name not in CLASSES:
        raise PeftcError(Diagnostic("P585", f"{SETTINGS} names `{name}`, which is none of {', '.join(CLASSES)}"))
    cls = getattr(import_module("sentence_transformers"), name)
    weights = Path(
        place if os.path.isdir(place) else snapshot_download(place, revision=revision, allow_patterns=_WEIGHTS)
    )
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent)
        for path in folder.iterdir():
            if path.name not in (CONFIGURATION, INDEX, METADATA) and path.suffix != ".safetensors":
                (whole / path.name).symlink_to(path.resolve())
        for pattern in _WEIGHTS:
            for path in weights.glob(pattern):
                (whole / path.name).symlink_to(path.resolve())
        config = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
        config.pop(WEIGHTS, None)
        (whole / CONFIGURATION).write_text(json.dumps(config), encoding="utf-8")
        model = cls(str(whole), **options)
    transformer = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    transformer.config.name_or_path = place
    return model.eval(), transformer
