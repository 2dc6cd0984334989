"""Names of models, as far as files tell: folders, config.json files and the catalogue. No torch."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.filesystem.bounded_read import read_regular
from peftc.models import catalogue
from peftc.models.catalogue import Head

Kind = Literal["catalogue", "folder", "config.json", "hub", "config", "module"]
_TASK = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_LARGEST = 16_000_000  # bytes of a config.json


@dataclass(frozen=True)
class NamedValues:
    """The values of the configuration that a name stands for."""

    kind: Kind
    values: Mapping[str, Any]
    path: Path | None = None
    head: Head | None = None


@dataclass(frozen=True)
class Request:
    """What decides a model without code of its own: what a user named, its values, its head."""

    name: str
    values: Mapping[str, Any]
    head: Head | None = None


def local_request(name: str, trust_remote_code: bool = False) -> Request | None:
    """The request for a name that is in files; None for other names and for code of its own.

    Raises: as `local_values`.
    """
    local = local_values(name) if name else None
    if local is None or (trust_remote_code and has_code(local.values)):
        return None
    return Request(name, local.values, local.head)


def with_task(name: str, task: str | None) -> str:
    """The name of a model whose class is that of an auto class: `NAME:TASK`."""
    return name if task is None else f"{name}:{task}"


def split_task(name: str) -> tuple[str, Head | None]:
    """The name of a model, and the task of its class where the name says one."""
    model, _, task = name.rpartition(":")
    is_task = bool(model) and _TASK.fullmatch(task) is not None and not os.path.lexists(os.path.expanduser(name))
    return (model, task) if is_task else (name, None)


def local_values(name: str) -> NamedValues | None:
    """What a name stands for if it is no id of the hub. Raises: P026, P027, P503."""
    model, task = split_task(name)
    local = _local_values(model)
    return local if local is None or task is None else replace(local, head=task)


def _local_values(name: str) -> NamedValues | None:
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path / "config.json"):
        return NamedValues("folder", read_values(path / "config.json"), path)
    if os.path.isfile(path):
        return NamedValues("config.json", read_values(path), path)
    if entry := catalogue.find(name):
        return NamedValues("catalogue", {**entry.config, "model_type": entry.model_type}, head=entry.head)
    return None


def read_values(path: Path) -> dict[str, Any]:
    """The values of a config.json. Raises: P026, P027, P503 if it is not a JSON object."""
    try:
        values = json.loads(read_regular(path, _LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        diagnostic = Diagnostic("P503", f"`{path}` cannot be read as JSON", notes=(error_summary(error),))
        raise PeftcError(diagnostic) from error
    if not isinstance(values, dict):
        raise PeftcError(Diagnostic("P503", f"`{path}` is not a JSON object"))
    return cast(dict[str, Any], values)


def has_code(values: Mapping[str, Any]) -> bool:
    """Whether a configuration names Python files of its repository."""
    return isinstance(values.get("auto_map"), dict)


def error_summary(error: BaseException) -> str:
    """The class and the first line of another library's error, for a note."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
