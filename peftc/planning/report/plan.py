"""The Plan: what the compiler will do, as plain data that can be printed as JSON and compared, and as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from peftc.addressing.path_compression import compress_paths
from peftc.addressing.sites import Site
from peftc.planning.counts import percent
from peftc.planning.ir import SiteEdit
from peftc.planning.report.shapes import mappings
from peftc.planning.report.text import plain_text
from peftc.planning.selection.shared_modules import uses
from peftc.planning.selection.untraced import reason_lines
from peftc.semantics.vocabulary import PLAN_COUNTS


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanSpec(_Part):
    """The text that was planned, by its hash."""

    path: str
    sha256: str


class PlanModel(_Part):
    """The base; `parameters` counts tied weights once. A fingerprint is compared with others of its version."""

    id: str
    type: str
    parameters: int
    fingerprint: str
    fingerprint_version: int = 1  # where nothing is said


class PlanSite(_Part):
    path: str
    module: str


class PlanEdit(_Part):
    """One edit or `train` statement. Counts in parameters; `reason` says why it folds or does not."""

    name: str
    sites: tuple[PlanSite, ...]
    trained: int
    stored: int
    changed: int
    served: int
    foldable: bool
    reason: str
    identity: bool


class PlanTotals(_Part):
    """Parameters: of the base, with a gradient, in the saved adapter, changed and left over after folding what folds."""

    base: int
    trained: int
    stored: int
    changed: int
    served: int


class PlanExpectation(_Part):
    text: str
    holds: bool


class PlanUnread(_Part):
    """A module in a layer that the spec changes, without names for what is in it, and why."""

    module: str
    type: str
    reason: str


class Plan(_Part):
    """What a spec does to a model. No weight was read to make it.

    Raises (on reading JSON): pydantic.ValidationError for unknown or missing keys.
    """

    format_version: Literal["1.0"] = "1.0"
    spec: PlanSpec
    model: PlanModel
    edits: tuple[PlanEdit, ...]
    totals: PlanTotals
    expectations: tuple[PlanExpectation, ...]
    unread: tuple[PlanUnread, ...] = ()

    def edit(self, name: str) -> PlanEdit:
        """The edit of that name. Raises: KeyError."""
        found = {edit.name: edit for edit in self.edits}
        return found[name]

    def __str__(self) -> str:
        return plan_text(self)


def plan_text(plan: Plan, placed: Sequence[SiteEdit] = (), width: int = 80) -> str:
    """The plan as plain text without colours."""
    return plain_text(render_plan(plan, placed), width)


def render_plan(plan: Plan, placed: Sequence[SiteEdit] = ()) -> RenderableType:
    """A header, the numbers of every edit with a total, and for each edit where it goes and whether it folds.

    Args:
        placed: the places of the edits, from which their shapes are read; without them no shapes are shown.
    """
    shapes = {edit.name: mappings(p for p in placed if p.edit == edit.name) for edit in plan.edits}
    shared = {edit.name: [p.site for p in placed if p.edit == edit.name and p.site.shared_with] for edit in plan.edits}
    parts: list[RenderableType] = [_header(plan), Text(), _numbers(plan)]
    for edit in plan.edits:
        parts += [Text(), _edit(edit, shapes.get(edit.name, ()), shared.get(edit.name, ()))]
    if plan.expectations:
        parts += [Text(), _expectations(plan)]
    if plan.unread:
        parts += [Text(), _unread(plan)]
    return Group(*parts)


def _header(plan: Plan) -> Text:
    model = plan.model
    return Text.assemble(
        (plan.spec.path, "bold"), " on ", (model.id, "bold"), f"  ({model.type}, {model.parameters:,} parameters)"
    )


def _numbers(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("edit", overflow="fold")
    table.add_column("sites", justify="right")
    for name in PLAN_COUNTS:
        table.add_column(name, justify="right")
    for edit in plan.edits:
        table.add_row(Text(edit.name), str(len(edit.sites)), *_row(edit, plan.totals.base))
    total = sum(len(edit.sites) for edit in plan.edits)
    table.add_section()
    table.add_row("total", str(total), *_row(plan.totals, plan.totals.base), style="bold")
    return table


def _row(numbers: PlanEdit | PlanTotals, base: int) -> Iterable[Text]:
    for name in PLAN_COUNTS:
        value: int = getattr(numbers, name)
        yield Text.assemble(f"{value:,}", "\n", (percent(value, base), "dim"))


def _edit(edit: PlanEdit, shapes: Sequence[str], shared: Sequence[Site] = ()) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    sites = compress_paths([site.path for site in edit.sites])
    modules = compress_paths([site.module for site in edit.sites])
    for label, lines in (("at", sites), ("in", modules)):
        table.add_row(label, Text("\n".join(f"{path} × {count}" if count > 1 else path for path, count in lines)))
    if shapes:
        table.add_row("shapes", Text("\n".join(shapes)))
    if shared:
        table.add_row("once for", Text("\n".join(" and ".join(one.path for one in uses(site)) for site in shared)))
    table.add_row("folds", Text.assemble(("yes", "green") if edit.foldable else ("no", "yellow"), f": {edit.reason}"))
    table.add_row("at init", "the model is unchanged" if edit.identity else "the model's output changes")
    return Group(Text(edit.name, "bold"), Padding(table, (0, 0, 0, 2)))


def _expectations(plan: Plan) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for expectation in plan.expectations:
        table.add_row(
            Text("holds", "green") if expectation.holds else Text("fails", "bold red"), Text(expectation.text)
        )
    return Group(Text("expectations", "bold"), Padding(table, (0, 0, 0, 2)))


def _unread(plan: Plan) -> RenderableType:
    return Group(Text("not read", "bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in reason_lines(plan.unread)))
