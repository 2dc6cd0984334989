"""Plans with the equations and shapes of their edits, as they are compared and written."""

from __future__ import annotations

from pydantic import Field

from peftc.planning.planner import PlanResult
from peftc.planning.report.plan import PlanExpectation, PlanModel, PlanTotals, mapping_text
from peftc.planning.report.plan_sites import PlanSites, Record
from peftc.syntax import ast
from peftc.syntax.printer import print_line, print_selector, print_statement, print_where


class EditText(Record):
    """An edit or a `train` statement of an expanded spec, in the layout of `peftc fmt`.

    Attributes:
        name: of the edit.
        at: its selector.
        body: its lines; of a `train` statement its states. Each call has all of its arguments.
    """

    name: str
    at: str
    body: tuple[str, ...]


class SpecRecord(Record):
    """What an expanded spec says, without a model.

    Attributes:
        edits: in the order of the spec.
        forms: the texts of the forms that the spec defines, by name.
        values: `let` statements outside of edits.
        expectations: as the formatter prints them.
        moves: `moved` statements.
    """

    edits: tuple[EditText, ...]
    forms: dict[str, str] = Field(default_factory=dict)
    values: tuple[str, ...] = ()
    expectations: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()


class EditOnModel(Record):
    """An edit on a model.

    Attributes:
        name: of the edit.
        sites: as in `PlanEdit`.
        shapes: what its forms map, such as `lora: […, 768] -> […, 768]`.
        trained: as in `PlanEdit`.
        stored: as in `PlanEdit`.
        changed: as in `PlanEdit`.
        served: as in `PlanEdit`.
        foldable: as in `PlanEdit`.
        identity: as in `PlanEdit`.
    """

    name: str
    sites: PlanSites
    shapes: tuple[str, ...]
    trained: int
    stored: int
    changed: int
    served: int
    foldable: bool
    identity: bool


class PlanRecord(Record):
    """What an expanded spec does to a model.

    Attributes:
        model: the base.
        edits: in the order of the spec.
        totals: over all edits.
        expectations: which of them hold.
    """

    model: PlanModel
    edits: tuple[EditOnModel, ...]
    totals: PlanTotals
    expectations: tuple[PlanExpectation, ...]


def spec_record(flat: ast.Spec) -> SpecRecord:
    """The record of an expanded spec."""
    statements = flat.statements
    return SpecRecord(
        edits=tuple(_edit_text(s) for s in statements if isinstance(s, ast.Edit | ast.Train)),
        forms={s.name: print_statement(s) for s in statements if isinstance(s, ast.Form)},
        values=tuple(print_statement(s) for s in statements if isinstance(s, ast.Let)),
        expectations=tuple(print_statement(s) for s in statements if isinstance(s, ast.Expect)),
        moves=tuple(print_statement(s) for s in statements if isinstance(s, ast.Moved)),
    )


def _edit_text(statement: ast.Edit | ast.Train) -> EditText:
    at = print_selector(statement.selector) + print_where(statement)
    if isinstance(statement, ast.Train):
        return EditText(name=statement.name, at=at, body=(f"train [{', '.join(statement.states)}]",))
    task = ("per task",) if statement.per_task else ()
    return EditText(name=statement.name, at=at, body=(*task, *map(print_line, statement.body)))


def plan_record(result: PlanResult) -> PlanRecord:
    """The record of a plan."""
    plan = result.plan
    shapes = {edit.name: dict[str, None]() for edit in plan.edits}
    for site_edit in result.site_edits.representatives:
        shapes[site_edit.edit].update((mapping_text(instance), None) for instance in site_edit.instances)
    edits = (
        EditOnModel(shapes=tuple(shapes[edit.name]), **{name: getattr(edit, name) for name in _OF_PLAN})
        for edit in plan.edits
    )
    return PlanRecord(model=plan.model, edits=tuple(edits), totals=plan.totals, expectations=plan.expectations)


_OF_PLAN = ("name", "sites", "trained", "stored", "changed", "served", "foldable", "identity")
