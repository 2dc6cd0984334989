"""Analyses are cached: that of a compiled model as long as the model does not change, and those of
the latest models in this process for others of the same structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from peftc.diagnostics.activity import activity
from peftc.installation.model_state import ModelState, check_classes, flags_of, own_modules, read_state, state_of
from peftc.models.samples import is_same_sample
from peftc.models.sources import ModelSource
from peftc.modules.module_rows import ModuleRows
from peftc.recognition.analysis import Analysis, analyse

T = TypeVar("T")
MOST = 8  # analyses of other models that are kept

_recent: list[tuple[object, ModelState, Analysis]] = []  # the latest is last; a state has no hash


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
        cls,
        model: nn.Module,
        analysis: Analysis,
        sample: Mapping[str, Any] | None,
        before: ModelState | None,
        tensors: Sequence[Tensor] | None,
    ) -> CachedAnalysis:
        """That of a model which had a state when its edits were put in: they change flags alone.
        `tensors`: those of the state, if they are known and still those of the model.
        """
        if before is None:
            return cls.of(model, analysis, sample)
        flags = flags_of(own_modules(model)) if tensors is None else tuple([t.requires_grad for t in tensors])
        return cls(analysis, sample, replace(before, flags=flags))

    def is_valid(self, model: nn.Module, sample: Mapping[str, Any] | None) -> bool:
        return self.state is not None and is_same_sample(sample, self.sample) and state_of(model) == self.state


def known_state(
    source: ModelSource, sample: Mapping[str, Any] | None = None
) -> tuple[ModelState | None, ModuleRows | None]:
    """The state of a source by which its analysis is shared, and its rows; None where it is not.

    Raises: P451.
    """
    if source.module is None:
        return None, None
    is_shared = MOST and sample is None
    state, rows = read_state(source.module) if is_shared else (None, None)
    if state is None:
        check_classes(source.module)
    return state, rows


def shared_analysis(
    source: ModelSource,
    sample: Mapping[str, Any] | None = None,
    state: ModelState | None = None,
    rows: ModuleRows | None = None,
) -> Analysis:
    """The analysis of a model, or of an earlier one in this process with an equal state. `rows`:
    those of its modules, if they are known.
    """
    source = replace(source, rows=rows)
    if state is None:
        return _analyse(source, sample)
    entry = recent_analysis(source, state)
    if entry is None:
        entry = (source_key(source), state, _analyse(source, sample))
    keep_latest(_recent, entry, MOST)
    return entry[2]


def _analyse(source: ModelSource, sample: Mapping[str, Any] | None) -> Analysis:
    with activity(f"tracing {source.id}"):
        return analyse(source, sample)


def keep_latest(entries: list[T], entry: T, most: int) -> None:
    """Puts an entry last, and drops the first ones above a number."""
    entries[:] = [*(other for other in entries if other is not entry), entry][-most:]


def recent_analysis(source: ModelSource, state: ModelState) -> tuple[object, ModelState, Analysis] | None:
    """The entry of an earlier model in this process with an equal state."""
    return next((entry for entry in _recent if entry[:2] == (source_key(source), state)), None)


def source_key(source: ModelSource) -> object:
    return (source.id, source.kind, source.type, source.folder)
