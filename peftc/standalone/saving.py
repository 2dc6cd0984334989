"""Saves an edited model as one that loads without peftc."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from peftc.adapters.base import require_values
from peftc.adapters.files import path_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.completeness import active_installation
from peftc.installation.edited_classes import save_with_edits
from peftc.installation.record import joint_spec, refuse_passes
from peftc.specialization.precompile import precompile
from peftc.standalone.modeling_file import MODELING, ModelingFile, own_class
from peftc.standalone.source_closure import refusal
from peftc.syntax.printer import print_spec


def save_standalone(model: nn.Module, directory: str | PathLike[str]) -> Path:
    """Saves a compiled model so that `from_pretrained` loads it where peftc is not installed.

    `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` gives the model. The
    folder has the weights of base and edits, a configuration that names the modeling file, and
    that file: the class of the model, with the generated forwards in the place of its own. It
    computes the same function, in training, too. Tokenizers are not in it.

    Args:
        model: a compiled model of transformers.
        directory: a new or empty one.

    Returns:
        The path of the directory.

    Raises:
        PeftcError: P410 (not compiled), P446 (a pass), P527 (no weights), P526 (cannot be
            written), P551 (the folder has files), P570 (what needs peftc: Python forms, parameters
            for each task, code that is not of torch or transformers).
    """
    record = active_installation(model)
    refuse_passes(record, "a model that runs without peftc has the code of equations alone")
    if not isinstance(model, PreTrainedModel):
        raise refusal(f"{type(model).__name__} is no PreTrainedModel, which `from_pretrained` could load")
    if saved := next(iter(record.adapter_parameters), None):
        raise refusal(f"`{saved.partition('/')[0]}` has values for each attached adapter")
    require_values(model.named_parameters())
    target = path_of(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        message = f"{target} is not an empty folder"
        raise PeftcError(Diagnostic("P551", message, help="name another one"))
    if any(kind.inline and not kind.variants for _, kind in record.regions):
        precompile(model, record.sample)
    file = ModelingFile(model, record, print_spec(joint_spec(spec.spec for spec in record.specs)))
    text = file.text
    compile(text, MODELING, "exec")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise _unwritable(target, error) from error
    try:
        save_with_edits(model, work)
        (work / f"{MODELING}.py").write_text(text, encoding="utf-8")
        _name_class(work / "config.json", model, file.name)
        work.chmod(0o755)
        os.replace(work, target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _unwritable(target: Path, error: OSError) -> PeftcError:
    return PeftcError(Diagnostic("P526", f"{target} cannot be written: {error.strerror or error}"))


def _name_class(path: Path, model: nn.Module, name: str) -> None:
    """Names the class of the file in a configuration, for each auto class that has the base."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = [name]
    config["auto_map"] = dict.fromkeys(auto_classes(own_class(model)), f"{MODELING}.{name}")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def auto_classes(cls: type[Any]) -> list[str]:
    """The auto classes of transformers that load a class; `AutoModel` if none does."""
    autos = {name: auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")}
    names = [n for n, auto in autos.items() if _loads(getattr(auto, "_model_mapping", None), cls)]
    return names or ["AutoModel"]


def _loads(mapping: Any, cls: type[Any]) -> bool:
    classes = () if mapping is None or cls.config_class not in mapping else mapping[cls.config_class]
    return cls in (classes if isinstance(classes, tuple | list) else (classes,))
