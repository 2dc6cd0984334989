"""What a saved adapter says of itself: `adapter.json`, beside `adapter.safetensors`."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.model import Plan

FORMAT = "1.0"
METADATA, TENSORS = "adapter.json", "adapter.safetensors"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredTensor(_Part):
    shape: tuple[int, ...]
    dtype: str  # as torch names it: "float32"


class BaseTensor(StoredTensor):
    """A parameter of the base; `sample` are a few of its values, none where they say nothing (trained, quantised)."""

    sample: tuple[float, ...]


class Base(_Part):
    """The base model: what identifies it, so that what differs can be told. `parameters` counts tied weights once."""

    id: str
    type: str
    parameters: int
    fingerprint: str
    facts: dict[str, bool | int | str]
    tied: tuple[tuple[str, ...], ...]
    tensors: dict[str, BaseTensor]


class Adapter(_Part):
    """All of an adapter but its tensors.

    `spec` is what the tensors are parameters of: expanded, with collapsed prefixes direct, without expectations. `source` is
    the expanded spec that was compiled, and `plan` its plan. `tasks` are those of edits `per task`. `sha256` is of the file of tensors.
    """

    format_version: Literal["1.0"] = FORMAT
    peftc: str
    spec: str
    source: str
    plan: Plan
    base: Base
    seed: int
    tasks: tuple[str, ...] = ()
    tensors: dict[str, StoredTensor]
    sha256: str


def parse_adapter(text: str) -> Adapter:
    """Raises: P521 where the text is not such a description, P522 where it is one of another format."""
    version = _version(text)
    if version != FORMAT:
        raise PeftcError(
            Diagnostic(
                "P522",
                f"the adapter has format {version!r}, and this version of peftc reads {FORMAT!r}",
                help="load it with the version of peftc that saved it",
            )
        )
    try:
        return Adapter.model_validate_json(text)
    except ValidationError as error:
        found = error.errors()
        notes = tuple(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found[:3])
        message = f"{METADATA} does not describe an adapter" + (f" ({len(found)} mistakes)" if len(found) > 1 else "")
        raise PeftcError(Diagnostic("P521", message, notes=notes)) from error


def _version(text: str) -> str:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeftcError(Diagnostic("P521", f"{METADATA} is not JSON", notes=(f"{error}",))) from error
    version = cast(dict[str, Any], data).get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str):
        raise PeftcError(Diagnostic("P521", f"{METADATA} does not describe an adapter: it has no `format_version`"))
    return version
