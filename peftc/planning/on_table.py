"""Plans by the table of sites alone, as far as they go: without the graphs of layers."""

from dataclasses import replace

from peftc.addressing.sites import SiteTable
from peftc.diagnostics import PeftcError
from peftc.forms.shapes import Tokens
from peftc.planning import ir
from peftc.planning.lowering_context import DEFAULT_TASK
from peftc.planning.planner import PlanResult, make_plan
from peftc.planning.representatives import SiteEdits
from peftc.syntax import ast


def plan_on_table(table: SiteTable, spec: ast.Spec, tasks: tuple[str, ...] = (), is_valid: bool = False) -> PlanResult:
    """The plan of an expanded spec. `is_valid`: as in `make_plan`.

    Raises: as `make_plan`, with notes on the model.
    """
    try:
        return make_plan(spec, table, tasks=tasks or (DEFAULT_TASK,), is_valid=is_valid)
    except PeftcError as error:
        notes = {"P201": table.warnings}
        raise PeftcError(
            replace(d, notes=(*d.notes, *notes.get(d.code, ()))) for d in error.diagnostics
        ) from error.__cause__


def needs_graphs(site_edits: SiteEdits) -> bool:
    """Whether the graphs decide if the edits can stand: those of prompts and of positions."""
    edits = site_edits.representatives
    return any(is_prompt(one) or any(i.selects_positions or i.form.counts_rows for i in one.instances) for one in edits)


def is_prompt(site_edit: ir.SiteEdit) -> bool:
    return any(isinstance(a.value, ir.Concat) and isinstance(a.value.shape, Tokens) for a in site_edit.assigns)
