"""Models whose code lies beside their configuration (`auto_map`). It is run only where the user says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.models.configs import error_summary, model_class


def has_code(values: Mapping[str, Any]) -> bool:
    """Whether a configuration names Python files of its repository."""
    return isinstance(values.get("auto_map"), dict)


def from_code(name: str, path: Path | None) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """The config and the model class that the code of a repository makes. Runs that code.

    Args: `path`: the folder or the config.json, where it is local.
    Raises: P504 (a configuration apart from its code), P510 (the code fails).
    """
    if path is not None and path.is_file():
        if path.name != "config.json":
            message = f"the code of {name} is looked for beside a file called config.json"
            raise PeftcError(Diagnostic("P504", message, help="give the folder of the model"))
        path = path.parent
    where = name if path is None else str(path)
    try:
        with paused_gc():
            config = cast(PretrainedConfig, AutoConfig.from_pretrained(where, trust_remote_code=True))
            return config, class_of(config, name, where)
    except PeftcError:
        raise
    except Exception as error:  # code of others raises whatever it likes
        raise PeftcError(Diagnostic("P510", f"the code of {name} fails", notes=(error_summary(error),))) from error


def class_of(config: PretrainedConfig, name: str, where: str) -> type[PreTrainedModel]:
    """The class that the configuration declares, of its own code if that has it, else of transformers."""
    reference = next(_references(config), None)
    if reference is None:
        return model_class(config, name)
    found = cast(object, get_class_from_dynamic_module(reference, where))
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PeftcError(Diagnostic("P503", f"`{reference}` of {name} is no model of transformers"))
    return found


def _references(config: PretrainedConfig) -> Iterator[str]:
    """Classes of models in the repository's code, `module.Class`: the declared architecture first."""
    declared: list[str] = list(getattr(config, "architectures", None) or [])
    every = {key: ref for key, ref in getattr(config, "auto_map", {}).items() if key.startswith("AutoModel")}
    references = [ref for ref in every.values() if isinstance(ref, str)]
    yield from (ref for ref in references if ref.rpartition(".")[2] in declared)
    yield from references
