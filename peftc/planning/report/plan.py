"""The Plan: what the compiler will do, as JSON and as tables of 80 columns."""

import io
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, Literal

from pydantic import PrivateAttr, model_serializer, model_validator
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from peftc.addressing.paths import compress_paths
from peftc.addressing.sites import SiteTable, UntracedModule
from peftc.planning.ir import FormInstance, SiteEdit
from peftc.planning.report.layer_values import PlanExcluded, PlanLayerValues
from peftc.planning.report.plan_sites import PlanSitePattern, PlanSites, Record
from peftc.planning.report.site_tree import render_sites
from peftc.planning.selection.selector_errors import reason_lines
from peftc.syntax.vocabulary import PLAN_COUNTS

_UNLIMITED = 10_000  # characters of a line


class PlanSpec(Record):
    """The spec of a plan.

    Attributes:
        path: of its file, or the name of the text.
        sha256: of its text.
    """

    path: str
    sha256: str


class PlanModel(Record):
    """The base of a plan.

    Attributes:
        id: the name of the model.
        type: transformers' model type, or the class of a plain module.
        parameters: of the base; tied weights count once.
        fingerprint: of its architecture, not of its values.
        fingerprint_version: of the way in which the fingerprint is computed.
    """

    id: str
    type: str
    parameters: int
    fingerprint: str
    fingerprint_version: int = 1  # of plans that do not say


class PlanEdit(Record):
    """One edit or `train` statement, with counts in parameters.

    Attributes:
        name: of the edit.
        sites: where it stands: a sequence of `PlanSite`; in JSON, a list of `PlanSiteRange`.
        trained: parameters with a gradient.
        stored: parameters in the saved adapter.
        changed: entries of the base that differ after folding; an upper bound when a method selects
            entries.
        served: parameters that inference has beside the base, after folding what folds.
        foldable: whether it can be folded into the weights.
        reason: why it folds or does not.
        identity: whether the model is unchanged before training.
        by_layer: what differs by layer; not in the JSON where nothing does.
        excluded: the sites that a condition excludes; not in the JSON without one.
    """

    name: str
    sites: PlanSites
    trained: int
    stored: int
    changed: int
    served: int
    foldable: bool
    reason: str  # why it folds or does not
    identity: bool
    by_layer: tuple[PlanLayerValues, ...] = ()
    excluded: PlanExcluded | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: Any) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key not in ("by_layer", "excluded") or value}


class PlanTotals(Record):
    """Counts of the whole plan, in parameters.

    Attributes:
        base: the size of the base; tied weights count once.
        trained: as in `PlanEdit`.
        stored: as in `PlanEdit`.
        changed: as in `PlanEdit`.
        served: as in `PlanEdit`.
    """

    base: int
    trained: int
    stored: int
    changed: int
    served: int


class PlanExpectation(Record):
    """An `expect` of the spec.

    Attributes:
        text: as the formatter prints it.
        holds: whether it holds.
    """

    text: str
    holds: bool


class PlanUnread(Record):
    """An untraced module in a layer that the spec edits.

    Attributes:
        module: its dotted name.
        type: its class.
        reason: why it could not be traced.
    """

    module: str
    type: str
    reason: str


MakeFigure = Callable[["Plan", Literal["html", "svg"]], str | None]


class Figure:
    """How the picture of a plan is made, for notebooks. It is no part of the plan: all are equal,
    and a copy or a pickle has none.
    """

    def __init__(self) -> None:
        self.make: MakeFigure | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Figure)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type["Figure"], tuple[()]]:
        return Figure, ()


class Plan(Record):
    """What compiling a spec onto a model would do. `str` gives the table that `peftc plan` prints.

    Attributes:
        spec: where the spec comes from.
        model: the base.
        edits: in the order of the spec.
        totals: over all edits.
        expectations: in the order of the spec.
        unread: modules in edited layers whose code could not be traced.

    Raises:
        pydantic.ValidationError: unknown or missing keys in the JSON.
    """

    format_version: Literal["2.0"] = "2.0"
    spec: PlanSpec
    model: PlanModel
    edits: tuple[PlanEdit, ...]
    totals: PlanTotals
    expectations: tuple[PlanExpectation, ...]
    unread: tuple[PlanUnread, ...] = ()
    _figure: Figure = PrivateAttr(default_factory=Figure)

    @model_validator(mode="before")
    @classmethod
    def _read_first_version(cls, data: Any) -> Any:
        """Each site of version 1.0 is a range of one site."""
        return (
            {**data, "format_version": "2.0"}
            if isinstance(data, dict) and data.get("format_version") == "1.0"
            else data
        )

    def edit(self, name: str) -> PlanEdit:
        """The edit of that name.

        Raises:
            KeyError: there is none.
        """
        return {edit.name: edit for edit in self.edits}[name]

    def __str__(self) -> str:
        return plain_text(render_plan(self))

    def _repr_html_(self) -> str:
        """For notebooks: tables, and the picture of `peftc.show` where pygraphviz is installed."""
        make = self._figure.make
        picture = make(self, "html") if make else None
        html: str = import_module("peftc.planning.report.html").plan_html(self, picture)
        return html

    def _repr_svg_(self) -> str | None:
        """For notebooks: the picture of `peftc.show`; None without pygraphviz, and of a copy."""
        return figure_svg(self)


def attach_figure(plan: Plan, make: MakeFigure) -> None:
    """Gives a plan its picture, which is made when a notebook shows it."""
    plan._figure.make = make  # pyright: ignore[reportPrivateUsage]  # of this file


def figure_svg(plan: Plan) -> str | None:
    """The picture of a plan; None without pygraphviz, and of a copy."""
    make = plan._figure.make  # pyright: ignore[reportPrivateUsage]  # of this file
    return make(plan, "svg") if make else None


def sites_text(table: SiteTable) -> str:
    """The tree of sites as text."""
    return plain_text(render_sites(table))


def plain_text(result: RenderableType, width: int = 80) -> str:
    """Text without colours and without blanks at the ends of lines."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False, highlight=False).print(result)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_plan(plan: Plan, site_edits: Sequence[SiteEdit] = ()) -> RenderableType:
    """The counts of every edit, and for each edit its sites and whether it folds.

    Args:
        site_edits: from which the shapes of the edits are read; without them no shapes are shown.
    """
    model = plan.model
    about = f"  ({model.type}, {model.parameters:,} parameters)"
    header = Text.assemble((plan.spec.path, "bold"), " on ", (model.id, "bold"), about)
    parts: list[RenderableType] = [header, Text(), Fitting(_counts(plan), _counts_by_edit(plan))]
    for edit in plan.edits:
        parts += [Text(), render_edit(edit, [s for s in site_edits if s.edit == edit.name])]
    if plan.expectations:
        table = Table.grid(padding=(0, 2, 0, 0))
        for expectation in plan.expectations:
            outcome = Text("holds", "green") if expectation.holds else Text("fails", "bold red")
            table.add_row(outcome, Text(expectation.text))
        parts += [Text(), Text("expectations", "bold"), _indented(table)]
    if plan.unread:
        modules = [UntracedModule(m.module, m.type, m.reason) for m in plan.unread]
        parts += [Text(), Text("not traced", "bold"), *map(_indented, map(Text, reason_lines(modules)))]
    return Group(*parts)


def _indented(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _counts(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("edit", overflow="fold")
    table.add_column("sites", justify="right")
    for name in PLAN_COUNTS:
        table.add_column(name, justify="right")
    for edit in plan.edits:
        table.add_row(Text(edit.name), str(len(edit.sites)), *counts_text(edit, plan.totals.base))
    total = sum(len(edit.sites) for edit in plan.edits)
    table.add_section()
    table.add_row("total", str(total), *counts_text(plan.totals, plan.totals.base), style="bold")
    return table


class Fitting:
    """A table, or another one where the lines are too short for it: numbers are never cut."""

    def __init__(self, wide: RenderableType, narrow: RenderableType) -> None:
        self._wide, self._narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        need = Measurement.get(console, options.update(max_width=_UNLIMITED), self._wide).maximum
        yield self._wide if need <= options.max_width else self._narrow


def _counts_by_edit(plan: Plan) -> Table:
    """The same counts, one below the other."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    sites = sum(len(edit.sites) for edit in plan.edits)
    for name, number, counts in (*((e.name, len(e.sites), e) for e in plan.edits), ("total", sites, plan.totals)):
        table.add_row(Text(name, "bold"))
        table.add_row("  sites", f"{number:,}")
        for count in PLAN_COUNTS:
            value: int = getattr(counts, count)
            table.add_row(f"  {count}", f"{value:,}", percent(value, plan.totals.base))
    return table


def percent(value: int, base: int) -> str:
    """`6.747 %` of the base, rounded down, so that a budget that is met never looks exceeded."""
    thousandths = 100_000 * value // base if base else 0
    return f"{thousandths // 1000}.{thousandths % 1000:03} %"


def counts_text(numbers: PlanEdit | PlanTotals, base: int) -> Iterable[Text]:
    """Each count, with its share of the base below it."""
    for name in PLAN_COUNTS:
        value: int = getattr(numbers, name)
        yield Text.assemble(f"{value:,}", "\n", (percent(value, base), "dim"))


def render_edit(edit: PlanEdit, site_edits: Sequence[SiteEdit]) -> RenderableType:
    """Where an edit stands, its shapes, and whether it folds."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    patterns = edit.sites.patterns()
    for label, paths in (("at", [one.path for one in patterns]), ("in", [one.module for one in patterns])):
        table.add_row(label, Text("\n".join(path_lines(paths, patterns))))
    if edit.excluded:
        others = edit.excluded.sites.patterns()
        lines = [f"`{edit.excluded.where}` leaves out", *path_lines([one.path for one in others], others)]
        table.add_row("not at", Text("\n".join(lines)))
    if shapes := dict.fromkeys(mapping_text(instance) for s in site_edits for instance in s.instances):
        table.add_row("shapes", Text("\n".join(shapes)))
    if edit.by_layer:
        table.add_row("by layer", Text("\n".join(map(str, edit.by_layer))))
    if shared := [s.site.uses for s in site_edits if s.site.shared_with]:
        table.add_row("once for", Text("\n".join(" and ".join(site.path for site in uses) for uses in shared)))
    table.add_row("folds", Text.assemble(("yes", "green") if edit.foldable else ("no", "yellow"), f": {edit.reason}"))
    table.add_row("at init", "the model is unchanged" if edit.identity else "the model's output changes")
    return Group(Text(edit.name, "bold"), _indented(table))


def path_lines(paths: Sequence[str], patterns: Sequence[PlanSitePattern]) -> list[str]:
    """`encoder.layer[0..5].attn.self × 6` for the paths of sites, or of their modules."""
    counts = [pattern.total for pattern in patterns]
    return [f"{path} × {count}" if count > 1 else path for path, count in compress_paths(paths, counts)]


def mapping_text(instance: FormInstance) -> str:
    """`adapter: […, 1024] -> […, 1024]`"""
    dims = instance.dims
    source = "" if dims.input is None else f"{dims.input} -> "
    shared = f", shared by {dims.sites} sites" if instance.owner is not None and dims.sites > 1 else ""
    return f"{instance.form.name}: {source}{instance.form.shape(instance.args, dims)}{shared}"
