"""From configuration values to a transformers config and the class of model that it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peftc.concurrency.garbage_collection import paused_gc
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import read_regular
from peftc.models.catalogue import Head

_LARGEST = 16_000_000  # bytes of a config.json


def read_values(path: Path) -> dict[str, Any]:
    """The values of a config.json.

    Raises: P026, P027 (no regular file, too large), P503 where the file is not a JSON object.
    """
    try:
        values = json.loads(read_regular(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise PeftcError(
            Diagnostic("P503", f"`{path}` cannot be read as JSON", notes=(error_summary(error),))
        ) from error
    if not isinstance(values, dict):
        raise PeftcError(Diagnostic("P503", f"`{path}` holds no JSON object"))
    return cast(dict[str, Any], values)


def config_from(values: Mapping[str, Any], name: str) -> PretrainedConfig:
    """The config with these values. Code that a repository brings along is never run.

    Raises: P503 (values that make no config), P504 (only the repository's own code knows this model).
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise PeftcError(Diagnostic("P503", f"the configuration of {name} has no `model_type`"))
    if model_type not in CONFIG_MAPPING:
        raise PeftcError(_unknown_type(model_type, values, name))
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(values))
    except Exception as error:  # transformers raises whatever its checks happen to raise
        message = f"the configuration of {name} makes no {model_type} model"
        raise PeftcError(Diagnostic("P503", message, notes=(error_summary(error),))) from error


def model_class(config: PretrainedConfig, name: str, head: Head | None = None) -> type[PreTrainedModel]:
    """The class to build: the one that `head` stands for, else the config's own architecture, else a fitting auto class.

    Raises: P503 where transformers has no such class.
    """
    declared: list[str] = list(getattr(config, "architectures", None) or [])
    wanted = _by_head(config, head) if head else next(iter(declared), None) or _by_head(config, _likely_head(config))
    with paused_gc():
        found = getattr(transformers, wanted, None) if wanted else None
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        shown = f"`{wanted}`" if wanted else f"a model for `{config.model_type}`"
        if getattr(config, "auto_map", None):
            raise PeftcError(needs_code(name, f"transformers {transformers.__version__} has no {shown}"))
        raise PeftcError(
            Diagnostic("P503", f"transformers {transformers.__version__} has no {shown}, needed for {name}")
        )
    return found


def error_summary(error: BaseException) -> str:
    """What an error of another library says, shortened to a note."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _unknown_type(model_type: str, values: Mapping[str, Any], name: str) -> Diagnostic:
    known = f"transformers {transformers.__version__} does not know the model type `{model_type}`"
    if "auto_map" not in values:
        return Diagnostic("P503", f"{known} of {name}")
    return needs_code(name, known)


def needs_code(name: str, reason: str) -> Diagnostic:
    return Diagnostic(
        "P504",
        f"{name} needs code from its repository, which was not run",
        notes=(reason, "its configuration names Python files that come with it (`auto_map`)"),
        help="if you trust that code: `--trust-remote-code`, in Python `trust_remote_code=True`",
    )


def _likely_head(config: PretrainedConfig) -> Head:
    from transformers.models.auto import modeling_auto as auto

    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq-lm"
    causal = config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "causal-lm" if causal and not masked else "base"


def _by_head(config: PretrainedConfig, head: Head) -> str | None:
    from transformers.models.auto import modeling_auto as auto

    names: dict[Head, tuple[Mapping[Any, Any], ...]] = {
        "base": (auto.MODEL_MAPPING_NAMES,),
        "causal-lm": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
        "seq2seq-lm": (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
    }
    for mapping in (*names[head], auto.MODEL_MAPPING_NAMES):
        if found := mapping.get(config.model_type):
            return found if isinstance(found, str) else found[0]
    return None
