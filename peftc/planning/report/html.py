"""Plans and tables of sites as HTML, for notebooks."""

from collections.abc import Iterator

from peftc.addressing.sites import SiteTable
from peftc.diagnostics.markup import clean, details, report, table
from peftc.diagnostics.suggestions import plural
from peftc.planning.report.plan import Plan, PlanEdit, PlanTotals, path_lines, percent
from peftc.planning.report.plan_sites import PlanSites
from peftc.planning.report.site_tree import site_rows
from peftc.syntax.vocabulary import PLAN_COUNTS


def plan_html(plan: Plan, figure: str | None) -> str:
    """The counts of a plan, what each edit is, and the figure if there is one."""
    return report(_plan(plan, figure))


def _plan(plan: Plan, figure: str | None) -> Iterator[str]:
    model = plan.model
    about = f"({clean(model.type)}, {model.parameters:,} parameters)"
    yield f"<div><strong>{clean(plan.spec.path)}</strong> on <strong>{clean(model.id)}</strong> {about}</div>"
    base = plan.totals.base
    rows = [(one.name, f"{len(one.sites):,}", *_counts(one, base)) for one in plan.edits]
    sites = sum(len(one.sites) for one in plan.edits)
    rows.append(("total", f"{sites:,}", *_counts(plan.totals, base)))
    yield from table(("edit", "sites", *PLAN_COUNTS), rows, range(1, 2 + len(PLAN_COUNTS)))
    if figure is not None:
        yield figure
    folds = [f"{'yes' if one.foldable else 'no'}: {one.reason}" for one in plan.edits]
    texts = zip(plan.edits, folds, strict=True)
    edits = [(one.name, _paths(one.sites), fold, _first(one)) for one, fold in texts]
    yield from details("sites and folds", table(("edit", "at", "folds", "at init"), edits))
    if excluded := [(one.name, one.excluded.where, _paths(one.excluded.sites)) for one in plan.edits if one.excluded]:
        yield from table(("edit", "condition", "leaves out"), excluded)
    if by_layer := [(one.name, str(values)) for one in plan.edits for values in one.by_layer]:
        yield from table(("edit", "by layer"), by_layer)
    if plan.expectations:
        outcomes = [("holds" if one.holds else "fails", one.text) for one in plan.expectations]
        yield from table(("", "expectation"), outcomes)
    if plan.unread:
        yield from table(("not traced", "class", "reason"), [(one.module, one.type, one.reason) for one in plan.unread])


def _counts(numbers: PlanEdit | PlanTotals, base: int) -> Iterator[str]:
    for name in PLAN_COUNTS:
        value: int = getattr(numbers, name)
        yield f"{value:,}\n{percent(value, base)}"


def _paths(sites: PlanSites) -> str:
    patterns = sites.patterns()
    return "\n".join(path_lines([one.path for one in patterns], patterns))


def _first(edit: PlanEdit) -> str:
    return "the model is unchanged" if edit.identity else "the model's output changes"


def sites_html(sites: SiteTable) -> str:
    """The tree of sites, as `peftc sites` prints it."""
    return report(_sites(sites))


def _sites(sites: SiteTable) -> Iterator[str]:
    about = f"({clean(sites.model_type)}, {sites.parameters:,} parameters)"
    yield f"<div><strong>{clean(sites.model_id)}</strong> {about}, {plural(len(sites.sites), 'site')}</div>"
    rows = [(name.replace("  ", "\u2003"), *others) for name, *others in site_rows(sites)]
    yield from table(("site", "module", "shape", "parameters", "states"), rows, (3,))
    if sites.untraced:
        rows = [(one.module, one.type, one.reason) for one in sites.untraced]
        yield from details("not traced", table(("module", "class", "reason"), rows))
    if sites.warnings:
        yield from table(("warning",), [(one,) for one in sites.warnings])
