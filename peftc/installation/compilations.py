"""What compiling a spec makes besides parameters. It belongs to an analysis, so that models of an
equal state share it: the plan, the regions, and the generated classes that no call changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from peftc.diagnostics import PeftcError
from peftc.installation.cached_analysis import keep_latest
from peftc.planning.on_table import needs_graphs, plan_on_table
from peftc.planning.planner import PlanResult
from peftc.recognition.analysis import Analysis
from peftc.recognition.layers import ModelStructure
from peftc.rewriting.assembly import regions_of
from peftc.rewriting.prompts import prompt_and_position_errors
from peftc.rewriting.region_list import RegionList
from peftc.semantics.checks.spec import with_origin
from peftc.specialization.generated_class import GeneratedClass
from peftc.syntax import ast

MOST = 8  # compilations that are kept for an analysis


@dataclass(eq=False)
class Compilation:
    """A plan on a model, the regions that it edits, and the classes of those without variants."""

    planned: PlanResult
    make_regions: Callable[[], RegionList]
    classes: dict[tuple[Any, ...], GeneratedClass] = field(default_factory=dict[tuple[Any, ...], GeneratedClass])

    @cached_property
    def regions(self) -> RegionList:
        """Raises: as `regions_of`."""
        return self.make_regions()

    @classmethod
    def of(cls, planned: PlanResult, structure: ModelStructure) -> Compilation:
        return cls(planned, lambda: regions_of(planned.site_edits, structure))


_recent: WeakKeyDictionary[Analysis, list[tuple[object, Compilation]]] = WeakKeyDictionary()  # the latest is last


def plan_on(analysis: Analysis, spec: ast.Spec, tasks: tuple[str, ...] = ()) -> PlanResult:
    """The plan of an expanded spec. Raises: as `make_plan`, with notes on the model; P418, P422."""
    # Equal statements of equal texts have equal spans, which equality ignores.
    key = (spec, spec.source, [getattr(s, "origin", None) for s in spec.statements], tasks)
    recent = _recent.setdefault(analysis, [])
    entry = next((entry for entry in recent if entry[0] == key), None)
    if entry is None:
        entry = (key, Compilation.of(new_plan(analysis, spec, tasks), analysis.structure))
    keep_latest(recent, entry, MOST)
    return entry[1].planned


def new_plan(analysis: Analysis, spec: ast.Spec, tasks: tuple[str, ...]) -> PlanResult:
    planned = plan_on_table(analysis.table, spec, tasks)
    if needs_graphs(planned.site_edits):
        statements = {s.name: s for s in spec.statements if isinstance(s, ast.Edit)}
        errors = prompt_and_position_errors(planned.site_edits, analysis.structure)
        if wrong := [with_origin(d, statements[edit], spec) for edit, d in errors]:
            raise PeftcError(wrong)
    return planned


def compilation_of(analysis: Analysis, planned: PlanResult) -> Compilation:
    """That of a plan, which others on the same analysis may have used."""
    own = (compilation for _, compilation in _recent.get(analysis, ()) if compilation.planned is planned)
    return next(own, None) or Compilation.of(planned, analysis.structure)
