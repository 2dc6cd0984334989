"""What a saved adapter says of itself: `adapter.json`, beside the file of tensors that it names."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import SEEDS
from peftc.planning.report.plan import Plan

FORMAT = "1.1"  # 1.0 has its tensors in `adapter.safetensors`, and no key `file`
FORMATS = ("1.0", FORMAT)
METADATA, TENSORS = "adapter.json", "adapter.safetensors"
TENSORS_NAME = r"adapter(-[0-9a-f]{16})?\.safetensors"


def tensors_name(sha256: str) -> str:
    """The name of a file of tensors, after its content: files of two adapters never have one name."""
    return f"adapter-{sha256[:16]}.safetensors"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredTensor(_Part):
    shape: tuple[NonNegativeInt, ...]
    dtype: str  # as torch names it: "float32"


class BaseTensor(StoredTensor):
    """A parameter of the base; `sample` are a few of its values, none where they say nothing (trained, quantised)."""

    sample: tuple[float, ...]


class Base(_Part):
    """The base model: what identifies it, so that what differs can be told. `parameters` counts tied weights once.

    `configuration` has the keys that the function depends on, from version 2 of the fingerprint on; those that were not at the
    defaults of their class are `configured`.
    """

    id: str
    type: str
    parameters: int
    fingerprint: str
    fingerprint_version: Literal[1, 2] = 1
    facts: dict[str, bool | int | str]
    configuration: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    configured: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...]
    tensors: dict[str, BaseTensor]


class WeightsDigest(_Part):
    """sha256 over the samples of the base's weights: so many `values` of each floating-point parameter that is neither trained nor
    quantised, at equal distances from its first to its last value, as float64.
    """

    values: int
    sha256: str


class Adapter(_Part):
    """All of an adapter but its tensors.

    `spec` is what the tensors are parameters of: expanded, with collapsed prefixes direct, without expectations. `source` is
    the expanded spec that was compiled, and `plan` its plan. `tasks` are those of edits `per task`. `file` is the name of the file of
    tensors, `sha256` is its hash.
    """

    format_version: Literal["1.0", "1.1"] = FORMAT
    peftc: str
    spec: str
    source: str
    plan: Plan
    base: Base
    weights_digest: WeightsDigest | None = None  # format 1.0 has none
    seed: Annotated[int, Field(ge=SEEDS.start, lt=SEEDS.stop)]
    tasks: tuple[str, ...] = ()
    tensors: dict[str, StoredTensor]
    file: str = Field(TENSORS, pattern=f"^{TENSORS_NAME}$")
    sha256: str


def parse_adapter(text: str) -> Adapter:
    """Raises: P521 where the text is not such a description, P522 where it is one of another format."""
    version = _version(text)
    if version not in FORMATS:
        raise PeftcError(
            Diagnostic(
                "P522",
                f"the adapter has format {version!r}, and this version of peftc reads {' and '.join(FORMATS)}",
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
