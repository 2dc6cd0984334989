"""A cache of model analyses for tests whose subject is not the analysis. A second model of the same
structure reuses the analysis of the first. A model that has parts which cannot be compared is
analysed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peftc.installation.cached_analysis import state_of
from peftc.models.sources import ModelSource
from peftc.recognition import analysis

_analyses: dict[Any, list[tuple[Any, analysis.Analysis]]] = {}


def analyse(model: Any, sample: Mapping[str, Any] | None = None) -> analysis.Analysis:
    own = isinstance(model, ModelSource) and type(model.module).__module__.startswith("transformers")
    state = state_of(model.module) if own and sample is None else None  # tests have classes of one name
    if state is None:
        return analysis.analyse(model, sample)
    source = (model.id, model.kind, model.type, model.model_class, model.folder, model.untied_head, model.own_code)
    analyses = _analyses.setdefault(source, [])  # a state can be compared, but has no hash
    for other, result in analyses:
        if other == state:
            return replace(result)
    analyses.append((state, analysis.analyse(model, sample)))
    return replace(analyses[-1][1])
