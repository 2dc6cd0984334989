"""Models with Python code in their repository (`auto_map`), run only with consent."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Runs the code of a repository: its config and its model class.

    Args: `path`: of a local folder or config.json.
    Raises: P504 (the configuration is not beside its code), P510 (the code fails).
    """
    if path is not None and path.is_file():
        if path.name != "config.json":
            message = f"the code of {name} can only be found beside a file named config.json"
            raise PeftcError(Diagnostic("P504", message, help="give the folder of the model"))
        path = path.parent
    repository = name if path is None else str(path)
    try:
        with paused_gc():
            config = cast(PretrainedConfig, AutoConfig.from_pretrained(repository, trust_remote_code=True))
            return config, class_of(config, name, repository)
    except PeftcError:
        raise
    except Exception as error:  # the repository's code raises anything
        raise PeftcError(Diagnostic("P510", f"the code of {name} fails", notes=(error_summary(error),))) from error


def class_of(config: PretrainedConfig, name: str, repository: str) -> type[PreTrainedModel]:
    """The declared class, from the repository's code if it has one, else from transformers."""
    declared: list[str] = list(getattr(config, "architectures", None) or [])
    auto_map: Mapping[str, Any] = getattr(config, "auto_map", {})
    references = [ref for key, ref in auto_map.items() if key.startswith("AutoModel") and isinstance(ref, str)]
    references.sort(key=lambda ref: ref.rpartition(".")[2] not in declared)  # the declared architecture first
    if not references:
        return model_class(config, name)
    cls = cast(object, get_class_from_dynamic_module(references[0], repository))
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise PeftcError(Diagnostic("P503", f"`{references[0]}` of {name} is not a model class of transformers"))
    return cls
