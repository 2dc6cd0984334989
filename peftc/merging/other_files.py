"""The files of a checkpoint besides its weights: configuration, tokenizer, parts in subfolders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from peftc.merging.checkpoint import INDEX
from peftc.models.sources import OTHER_FORMATS

CONFIGURATION, REPORT, REST = "config.json", "peftc-merge.json", "adapter"
QUANTIZATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")  # read beside config.json


def other_files(folder: Path, shards: Iterable[str], dense: bool = False) -> tuple[list[Path], list[Path]]:
    """What is copied, and what is not, as paths in the folder. `dense`: without what describes a
    quantisation.

    Pickles and other formats hold the base; so does safetensors beside the shards, such as the
    original format of a model. Hidden files are those of version control.
    """
    own = {*shards, INDEX, REPORT}
    copied, left = list[Path](), list[Path]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in name.parts) or str(name) in own:
            continue
        stem = path.name.removesuffix(".index.json")
        is_weights = Path(stem).suffix in (*OTHER_FORMATS, ".msgpack")
        is_weights |= len(name.parts) == 1 and Path(stem).suffix == ".safetensors"
        is_quantization = dense and str(name) in QUANTIZATIONS
        (left if is_weights or is_quantization else copied).append(name)
    return copied, left


def copy_files(source: Path, target: Path, names: Iterable[Path]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def change_configuration(path: Path, values: Mapping[str, Any], dropped: Collection[str] = ()) -> None:
    """Sets and drops values, also where the configuration of a part of the model has them."""
    if not values and not dropped:
        return
    configuration: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    parts = [part for part in configuration.values() if isinstance(part, dict)]
    for name, value in values.items():
        for part in parts:
            if name in part:
                part[name] = value
        configuration[name] = value
    for part, name in ((part, name) for part in (configuration, *parts) for name in dropped):
        part.pop(name, None)
    path.write_text(json.dumps(configuration, indent=2) + "\n", encoding="utf-8")
