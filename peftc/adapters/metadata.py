"""The format of `adapter.json`, which describes a saved adapter and names its file of tensors."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import Field, NonNegativeInt, ValidationError

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import SEEDS
from peftc.planning.ir import SiteEdit
from peftc.planning.report.plan import Plan, Record

# 1.0 has its tensors in `adapter.safetensors` and no key `file`; plans have version 2.0 since 1.2.
# 1.3 has edits of modules that their layers call several times, which act at each call; before
# 1.3 they acted at one. All other adapters are saved as 1.2.
FORMAT, EVERY_CALL_FORMAT = "1.2", "1.3"
FORMATS = ("1.0", "1.1", FORMAT, EVERY_CALL_FORMAT)
METADATA, TENSORS = "adapter.json", "adapter.safetensors"
TENSORS_NAME = r"adapter(-[0-9a-f]{16})?\.safetensors"


def tensors_name(sha256: str) -> str:
    """The name of a file of tensors, which depends on its content."""
    return f"adapter-{sha256[:16]}.safetensors"


class StoredTensor(Record):
    shape: tuple[NonNegativeInt, ...]
    dtype: str  # as torch names it: "float32"


class BaseTensor(StoredTensor):
    """A base parameter. `sample`: a few values, or none if it is trained or quantised."""

    sample: tuple[float, ...]


class Base(Record):
    """What identifies the base model. `parameters` counts tied weights once.

    From version 2 of the fingerprint on, `configuration` has the keys on which the function of the
    model depends, and `configured` names those that differ from the defaults of their class.
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


class WeightsDigest(Record):
    """sha256 over samples of the floating-point parameters that are not trained or quantised."""

    values: int  # of each sample, in float64, at equal distances
    sha256: str


class Adapter(Record):
    """An adapter without its tensors."""

    format_version: Literal["1.0", "1.1", "1.2", "1.3"] = FORMAT
    peftc: str
    spec: str  # the expanded spec of the saved parameters, in export form and without expectations
    source: str  # the expanded spec that was compiled
    plan: Plan  # of `source`
    base: Base
    weights_digest: WeightsDigest | None = None  # format 1.0 has none
    seed: Annotated[int, Field(ge=SEEDS.start, lt=SEEDS.stop)]
    tasks: tuple[str, ...] = ()  # of edits `per task`
    tensors: dict[str, StoredTensor]
    file: str = Field(TENSORS, pattern=f"^{TENSORS_NAME}$")  # of the tensors
    sha256: str  # of `file`


def edits_of_every_call(site_edits: Iterable[SiteEdit]) -> list[SiteEdit]:
    """The edits of what a Linear or a norm computes in each of several calls by its layer."""
    return [
        p
        for p in site_edits
        if p.site.is_of_every_call
        and p.site.steps[-1][0] != "hidden"  # which has always been of every call
        and any(p.site.states[name].activation is not None for name in {*p.reads(), *(a.state for a in p.assigns)})
    ]


def is_before_every_call(adapter: Adapter) -> bool:
    """Whether an adapter's edits acted at one of several calls."""
    return FORMATS.index(adapter.format_version) < FORMATS.index(EVERY_CALL_FORMAT)


def parse_adapter(text: str) -> Adapter:
    """Raises: P521 for a malformed description, P522 for another format version."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeftcError(Diagnostic("P521", f"{METADATA} is not JSON", notes=(f"{error}",))) from error
    version = cast(dict[str, Any], data).get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str):
        raise PeftcError(Diagnostic("P521", f"{METADATA} does not describe an adapter: it has no `format_version`"))
    if version not in FORMATS:
        message = f"the adapter has format {version!r}, and this version of peftc reads {', '.join(FORMATS)}"
        raise PeftcError(Diagnostic("P522", message, help="load it with the version of peftc that saved it"))
    try:
        return Adapter.model_validate_json(text)
    except ValidationError as error:
        errors = error.errors()
        notes = tuple(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors[:3])
        message = f"{METADATA} does not describe an adapter" + (f" ({len(errors)} mistakes)" if len(errors) > 1 else "")
        raise PeftcError(Diagnostic("P521", message, notes=notes)) from error
