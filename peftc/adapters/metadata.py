"""The format of `adapter.json`, which describes a saved adapter and names its file of tensors."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

from pydantic import Field, NonNegativeInt, ValidationError

from peftc.addressing.sites import ActivationRef
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import SEEDS
from peftc.planning.ir import SiteEdit
from peftc.planning.report.plan import Plan, Record

# 1.0 has its tensors in `adapter.safetensors` and no key `file`; plans have version 2.0 since 1.2.
# 1.3 and 1.4 are of adapters with edits whose meaning has changed (`CHANGES`); 1.5 has the texts of
# built-in forms, 1.6 names Python forms, 1.7 says where the base is, 1.8 names passes. All others
# have 1.2.
Format = Literal["1.0", "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7", "1.8"]
FORMATS: tuple[Format, ...] = get_args(Format)
FORMAT: Format = "1.2"
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


class Origin(Record):
    """Where a base comes from.

    Attributes:
        name: its hub id, or the absolute path of its folder; None for a model that was not loaded.
        revision: the commit on the hub, if it is known.
        library: the package of its class: "transformers" or "diffusers".
        architecture: its class.
    """

    name: str | None
    revision: str | None
    library: Literal["transformers", "diffusers"]
    architecture: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


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
    origin: Origin | None = None  # of models of libraries that can load them


class WeightsDigest(Record):
    """sha256 over samples of the floating-point parameters that are not trained or quantised."""

    values: int  # of each sample, in float64, at equal distances
    sha256: str


class PythonForm(Record):
    """A form that is a class outside of peftc: its path, and the version of what it computes."""

    path: str  # "package.module:Class"
    version: int


class Adapter(Record):
    """An adapter without its tensors."""

    format_version: Format = FORMAT
    peftc: str
    spec: str  # the expanded spec of the saved parameters, in export form and without expectations
    source: str  # the expanded spec that was compiled
    forms: dict[str, str] = Field(default_factory=dict)  # the texts of the built-in forms of `spec`, by name
    python_forms: dict[str, PythonForm] = Field(default_factory=dict)  # those of `spec` that are not of peftc
    passes: tuple[str, ...] = ()  # the edits of `spec` that are functions of a program
    plan: Plan  # of `source`
    base: Base
    weights_digest: WeightsDigest | None = None  # format 1.0 has none
    seed: Annotated[int, Field(ge=SEEDS.start, lt=SEEDS.stop)]
    tasks: tuple[str, ...] = ()  # of edits `per task`
    tensors: dict[str, StoredTensor]
    file: str = Field(TENSORS, pattern=f"^{TENSORS_NAME}$")  # of the tensors
    sha256: str  # of `file`


class Change(NamedTuple):
    """A change of what some edits mean. `format`: the first in which they have the new meaning."""

    format: Format
    concerns: Callable[[SiteEdit], bool]
    before: str
    now: str


def _is_of_every_call(edit: SiteEdit) -> bool:
    """Whether an edit is of what a Linear or a norm computes in each of several calls."""
    is_hidden = edit.site.steps[-1][0] == "hidden"  # which has always been of every call
    return edit.site.is_of_every_call and not is_hidden and any(_activations(edit))


def _has_features_of_reader(edit: SiteEdit) -> bool:
    return any(activation.by_reader for activation in _activations(edit))


def _is_before_padding(edit: SiteEdit) -> bool:
    return any(activation.before_padding for activation in _activations(edit))


def _activations(edit: SiteEdit) -> Iterator[ActivationRef]:
    for name in {*edit.reads(), *(a.state for a in edit.assigns)}:
        if (activation := edit.site.states[name].activation) is not None:
            yield activation


CHANGES = (
    Change("1.3", _is_of_every_call, "acted at one call of its module", "it acts at each call in the layer"),
    Change("1.4", _has_features_of_reader, "took tokens for features", "it takes the features of what reads the value"),
    Change("1.4", _is_before_padding, "took the padded value", "it takes the value before the padding"),
)


def format_of(
    site_edits: Iterable[SiteEdit],
    forms: Mapping[str, str],
    python_forms: Mapping[str, PythonForm],
    origin: Origin | None = None,
    passes: Collection[str] = (),
) -> Format:
    """The format of an adapter with these edits, texts of built-in forms, Python forms, base."""
    edits = list(site_edits)
    first: Format = "1.8" if passes else "1.7" if origin else "1.6" if python_forms else "1.5" if forms else FORMAT
    return max([first, *(c.format for c in CHANGES if any(map(c.concerns, edits)))], key=FORMATS.index)


def changed_edits(adapter: Adapter, site_edits: Iterable[SiteEdit]) -> Iterator[tuple[SiteEdit, Change]]:
    """The edits that had another meaning when the adapter was saved."""
    later = [c for c in CHANGES if FORMATS.index(adapter.format_version) < FORMATS.index(c.format)]
    return ((edit, change) for edit in site_edits for change in later if change.concerns(edit))


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
