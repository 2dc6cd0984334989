"""Analyses are cached: that of a compiled model as long as the model does not change, and those of
the latest models in this process for others of the same structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from peftc.concurrency.context import CHOICE
from peftc.models.samples import is_same_sample
from peftc.models.sources import ModelSource
from peftc.modules.memory import storage_id
from peftc.modules.torch_attributes import ATTRIBUTES
from peftc.modules.walk import Named, all_named_modules
from peftc.recognition.analysis import Analysis, analyse
from peftc.rewriting.edits import CONTAINER, SHARED
from peftc.tracing.bytecode import reachable_code

T = TypeVar("T")
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)
HOOKS = [key for key in ATTRIBUTES if key.endswith(("_hooks", "_called"))]
PEFTC = frozenset({"_peftc", CHOICE, "peftc_originals", "peftc_completeness"})
_NO_ATTRIBUTES = ATTRIBUTES | PEFTC
_SIMPLE = frozenset({bool, int, float, str, type(None)})

MOST = 8  # analyses of other models that are kept

_recent: list[tuple[object, ModelState, Analysis]] = []  # the latest is last; a state has no hash


class NotComparable(Exception):
    """A model has an attribute whose changes cannot be seen."""


@dataclass(frozen=True)
class ModelState:
    """All that an analysis depends on.

    Attributes:
        modules: of each module its name and tensors, as texts and numbers; numbers of objects count
            what is new, others are places in `parts`.
        parts: all other values, equal ones once: of many layers as many as of one.
        flags: `requires_grad` of all parameters and buffers.
    """

    modules: tuple[Any, ...]
    parts: tuple[Any, ...]
    flags: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class CachedAnalysis:
    """`state` is that of the compiled model. If it has changed, the analysis may be wrong."""

    analysis: Analysis
    sample: Mapping[str, Any] | None
    state: ModelState | None

    @classmethod
    def of(cls, model: nn.Module, analysis: Analysis, sample: Mapping[str, Any] | None) -> CachedAnalysis:
        return cls(analysis, sample, state_of(model))

    @classmethod
    def after_edits(
        cls, model: nn.Module, analysis: Analysis, sample: Mapping[str, Any] | None, before: ModelState | None
    ) -> CachedAnalysis:
        """That of a model which had a state when its edits were put in: they change flags alone."""
        if before is None:
            return cls.of(model, analysis, sample)
        flags = tuple([t.requires_grad for _, m in own_modules(model) for _, t in tensors_of(m) if t is not None])
        return cls(analysis, sample, replace(before, flags=flags))

    def is_valid(self, model: nn.Module, sample: Mapping[str, Any] | None) -> bool:
        return self.state is not None and is_same_sample(sample, self.sample) and state_of(model) == self.state


def known_state(source: ModelSource, sample: Mapping[str, Any] | None = None) -> ModelState | None:
    """The state of a source by which its analysis is shared; None where it is not."""
    return state_of(source.module) if MOST and source.module is not None and sample is None else None


def shared_analysis(
    source: ModelSource, sample: Mapping[str, Any] | None = None, state: ModelState | None = None
) -> Analysis:
    """The analysis of a model, or of an earlier one in this process with an equal state."""
    if state is None:
        return analyse(source, sample)
    entry = recent_analysis(source, state)
    if entry is None:
        entry = (source_key(source), state, analyse(source, sample))
    keep_latest(_recent, entry, MOST)
    return entry[2]


def keep_latest(entries: list[T], entry: T, most: int) -> None:
    """Puts an entry last, and drops the first ones above a number."""
    entries[:] = [*(other for other in entries if other is not entry), entry][-most:]


def recent_analysis(source: ModelSource, state: ModelState) -> tuple[object, ModelState, Analysis] | None:
    """The entry of an earlier model in this process with an equal state."""
    return next((entry for entry in _recent if entry[:2] == (source_key(source), state)), None)


def source_key(source: ModelSource) -> object:
    return (source.id, source.kind, source.type, source.folder)


def state_of(model: nn.Module) -> ModelState | None:
    """Classes, code, attributes and layouts of a model; None where one cannot be compared."""
    try:
        return _state(model)
    except NotComparable:
        return None


def own_modules(model: nn.Module) -> Named:
    """The modules of a model without those of edits."""
    modules = all_named_modules(model, CONTAINER)
    return [pair for pair in modules if not pair[0].startswith(SHARED) or pair[0].split(".")[0] != SHARED]


def tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    """The parameters and buffers of a module itself."""
    parameters, buffers = vars(module)["_parameters"], vars(module)["_buffers"]
    return [*parameters.items(), *buffers.items()] if buffers else parameters.items()


def class_without_edits(cls: type[Any]) -> type[Any]:
    """The class that a module had before it got a generated one, or an overlay."""
    while (own := vars(cls)).keys() & {"_peftc_under", "_peftc_kind"}:
        cls = own["_peftc_under"] if "_peftc_under" in own else own["_peftc_kind"].base
    return cls


class _Numbers(dict[Any, int]):
    """The number of each value: how many others came before it."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


def _state(model: nn.Module) -> ModelState:
    objects, memories = _Numbers(), _Numbers()  # by `id`: several modules may share one
    values, layouts, codes = _Numbers(), _Numbers(), dict[type, tuple[int, tuple[Any, ...]]]()
    config = getattr(model, "config", None)
    configs: dict[int, Any] = {}  # several modules may have one
    modules: list[tuple[Any, ...]] = []
    flags: list[bool] = []

    def attribute(value: Any) -> Any:
        if value is config:
            return objects[id(value)]
        if not isinstance(value, PretrainedConfig):
            return comparable(value)
        if id(value) not in configs:
            configs[id(value)] = comparable(value)
        return configs[id(value)]

    for name, module in own_modules(model):
        own = vars(module)
        if any(map(own.get, HOOKS)):
            raise NotComparable
        if type(module) not in codes:
            cls = class_without_edits(type(module))
            codes[type(module)] = values[cls], (cls, reachable_code(cls))
        attributes = [(key, attribute(value)) for key, value in own.items() if key not in _NO_ATTRIBUTES]
        row: list[Any] = [name, objects[id(module)], codes[type(module)][0], values[tuple(attributes)]]
        for key, tensor in tensors_of(module):
            if tensor is None:
                row.append(key)
            elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
                raise NotComparable
            else:
                layout = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
                row += (key, objects[id(tensor)], memories[storage_id(tensor)], layouts[layout])
                flags.append(tensor.requires_grad)
        modules.append(tuple(row))
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    parts = (modes, comparable(config), *values, *layouts, *(code for _, code in codes.values()))
    return ModelState(tuple(modules), parts, tuple(flags))


def comparable(value: Any) -> Any:
    """A value that is equal exactly where an attribute is the same. Raises: NotComparable."""
    if type(value) in _SIMPLE:
        return type(value), value
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, PretrainedConfig):
        return type(value), value.to_json_string(use_diff=False), getattr(value, "_attn_implementation", None)
    if isinstance(value, GenerationConfig):
        return type(value), str(value)
    if isinstance(value, tuple | list):
        return type(value), *map(comparable, value)
    if isinstance(value, dict):
        return type(value), *((comparable(k), comparable(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(comparable, value))
    library = str(getattr(value, "__module__", "")).startswith(("torch", "transformers"))
    if library and callable(value) and "<" not in getattr(value, "__qualname__", "<"):
        return value  # one of its functions
    raise NotComparable
