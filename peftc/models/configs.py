"""Makes transformers configs from values, and finds the model class of a config."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.models.catalogue import Head
from peftc.models.names import error_summary


def config_from(values: Mapping[str, Any], name: str) -> PretrainedConfig:
    """The config, without code of its repository. Raises: P503, P504 (that code is needed)."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise PeftcError(Diagnostic("P503", f"the configuration of {name} has no `model_type`"))
    if model_type not in CONFIG_MAPPING:
        reason = f"transformers {transformers.__version__} does not know the model type `{model_type}`"
        unknown = Diagnostic("P503", f"{reason} of {name}")
        raise PeftcError(_needs_code(name, reason) if "auto_map" in values else unknown)
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(values))
    except Exception as error:  # transformers raises whatever its checks raise
        message = f"the configuration of {name} makes no {model_type} model"
        raise PeftcError(Diagnostic("P503", message, notes=(error_summary(error),))) from error


def model_class(config: PretrainedConfig, name: str, head: Head | None = None) -> type[PreTrainedModel]:
    """The class of `head`, else the declared one, else that of an auto class. Raises: P503."""
    declared: str | None = next(iter(getattr(config, "architectures", None) or []), None)
    class_name = declared if declared and head is None else _auto_class(config, head)
    with paused_gc(promote=True):
        cls = getattr(transformers, class_name, None) if class_name else None
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        return cls
    missing = f"`{class_name}`" if class_name else f"a model for `{config.model_type}`"
    reason = f"transformers {transformers.__version__} has no {missing}"
    unknown = Diagnostic("P503", f"{reason}, needed for {name}")
    raise PeftcError(_needs_code(name, reason) if getattr(config, "auto_map", None) else unknown)


def _needs_code(name: str, reason: str) -> Diagnostic:
    notes = (reason, "its configuration names Python files of the repository (`auto_map`)")
    help_ = "if you trust that code: `--trust-remote-code`, in Python `trust_remote_code=True`"
    return Diagnostic("P504", f"{name} needs code from its repository, which was not run", notes=notes, help=help_)


def auto_classes() -> dict[Head, Any]:
    """The auto classes of transformers by task: "causal-lm" for `AutoModelForCausalLM`."""
    names = (name for name in vars(auto) if name.startswith("AutoModelFor") and name[-1] != "_")
    tasks = {re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removeprefix("AutoModelFor")).lower(): name for name in names}
    return {"base": auto.AutoModel} | {task: getattr(auto, name) for task, name in sorted(tasks.items())}


def auto_class(task: Head) -> Any:
    """The auto class of a task. Raises: P513."""
    classes = auto_classes()
    if task in classes:
        return classes[task]
    help_ = did_you_mean(task, classes) or f"one of {join_names(list(classes))}"
    raise PeftcError(Diagnostic("P513", f"transformers has no auto class for the task `{task}`", help=help_))


def task_class(config: PretrainedConfig, name: str, task: Head) -> type[PreTrainedModel]:
    """The class of an auto class for a model. Raises: P513."""
    mapping = auto_class(task)._model_mapping
    if type(config) not in mapping:
        own = [other for other, cls in auto_classes().items() if type(config) in cls._model_mapping]
        message = f"transformers has no {config.model_type} model for the task `{task}`, needed for {name}"
        raise PeftcError(Diagnostic("P513", message, help=f"one of {join_names(own)}" if own else None))
    with paused_gc(promote=True):
        cls = mapping[type(config)]
    return cls[0] if isinstance(cls, tuple) else cls


def _auto_class(config: PretrainedConfig, head: Head | None) -> str | None:
    """The name of the class that the auto class for `head`, else a likely one, would build."""
    if head is None:
        masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        causal = config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked
        head = "seq2seq-lm" if getattr(config, "is_encoder_decoder", False) else "causal-lm" if causal else "base"
    mappings: dict[Head, tuple[Mapping[Any, Any], ...]] = {
        "base": (),
        "causal-lm": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
        "seq2seq-lm": (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
    }
    classes = (mapping.get(config.model_type) for mapping in (*mappings[head], auto.MODEL_MAPPING_NAMES))
    names = next(filter(None, classes), None)
    return names if names is None or isinstance(names, str) else names[0]


# Code of a repository (`auto_map`), run only with consent


def from_code(name: str, path: Path | None, task: Head | None) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """Runs the code beside `path` (a folder or config.json), or of the hub.

    Raises: P504, P510, P513.
    """
    if path is not None and path.is_file():
        if path.name != "config.json":
            message = f"the code of {name} can only be found beside a file named config.json"
            raise PeftcError(Diagnostic("P504", message, help="give the folder of the model"))
        path = path.parent
    repository = name if path is None else str(path)
    try:
        with paused_gc(promote=True):
            config = cast(PretrainedConfig, AutoConfig.from_pretrained(repository, trust_remote_code=True))
            return config, class_of(config, name, repository, task)
    except PeftcError:
        raise
    except Exception as error:  # the repository's code raises anything
        raise PeftcError(Diagnostic("P510", f"the code of {name} fails", notes=(error_summary(error),))) from error


def class_of(config: PretrainedConfig, name: str, repository: str, task: Head | None = None) -> type[PreTrainedModel]:
    """The declared class, or that of a task: of the repository's code, else of transformers."""
    declared: list[str] = list(getattr(config, "architectures", None) or [])
    auto_map: Mapping[str, Any] = getattr(config, "auto_map", {})
    own = "AutoModel" if task is None else auto_class(task).__name__
    keys = [key for key in auto_map if (key.startswith(own) if task is None else key == own)]
    references = [ref for key in keys if isinstance(ref := auto_map[key], str)]
    references.sort(key=lambda ref: ref.rpartition(".")[2] not in declared)  # the declared architecture first
    if not references:
        return model_class(config, name) if task is None else task_class(config, name, task)
    cls = cast(object, get_class_from_dynamic_module(references[0], repository))
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise PeftcError(Diagnostic("P503", f"`{references[0]}` of {name} is not a model class of transformers"))
    return cls
