"""What plans say of the edits of a text: sites, counts, shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from peftc.diagnostics import Span
from peftc.diagnostics.suggestions import plural
from peftc.language_server.analysis import Analysis, ModelPlan
from peftc.syntax import ast
from peftc.syntax.vocabulary import PLAN_COUNTS

if TYPE_CHECKING:
    from peftc.planning.ir import SiteEdit
    from peftc.planning.report.plan import PlanEdit


class EditPlan(NamedTuple):
    """What an edit of a text becomes on a model.

    Attributes:
        model: its name.
        edits: of the plan; several if the method with the edit is applied several times.
        site_edits: one of each kind.
        base: the parameters of the model.
    """

    model: str
    edits: Sequence[PlanEdit]
    site_edits: Sequence[SiteEdit]
    base: int

    @property
    def sites(self) -> int:
        return sum(len(edit.sites) for edit in self.edits)

    def count(self, name: str) -> int:
        """One of the counts of a plan, over all these edits."""
        return sum(getattr(edit, name) for edit in self.edits)

    def summary(self) -> str:
        """`24 sites · 1,179,648 parameters`: those with a gradient."""
        return f"{plural(self.sites, 'site')} · {self.count('trained'):,} parameters"

    def details(self) -> str:
        """Every count."""
        return ", ".join(f"{self.count(name):,} {name}" for name in PLAN_COUNTS)


def plans_of_edit(analysis: Analysis, name: Span) -> Iterator[EditPlan]:
    """The plans of the edit or `train` statement whose name stands at a place of the text."""
    for plan in analysis.plans:
        names = {one.name for one in _statements(plan, analysis.document.path) if one.name_span == name}
        if edits := [edit for edit in plan.result.plan.edits if edit.name in names]:
            site_edits = [one for one in plan.result.site_edits.representatives if one.edit in names]
            yield EditPlan(plan.model, edits, site_edits, plan.result.plan.model.parameters)


def planned_names(analysis: Analysis) -> dict[Span, Span]:
    """The edits of a text that have a plan: the place of the name, and of the whole statement."""
    statements = (one for plan in analysis.plans for one in _statements(plan, analysis.document.path))
    return {one.name_span: one.span for one in statements}


def _statements(plan: ModelPlan, path: str) -> Iterator[ast.Edit | ast.Train]:
    """The expanded statements that stand in a file."""
    for one in plan.flat.statements:
        if isinstance(one, ast.Edit | ast.Train) and (one.origin or plan.flat.source).path == path:
            yield one
