"""The sites that a selector names, as a table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.addressing.selection import Selection
from peftc.addressing.sites import SiteTable
from peftc.planning.report.plan_sites import LAYER, NUMBER, PlanSiteRange
from peftc.planning.report.sites_json import entries_of


def render_selection(table: SiteTable, selection: Selection, text: str) -> RenderableType:
    """A line for all sites that differ in numbers alone, with the shapes of their states."""
    entries = entries_of(table, selection)
    total = sum(len(entry) for entry, _ in entries)
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("site", "module", "states"):
        grid.add_column(name, overflow="fold")
    for entry, states in entries:
        shapes = "\n".join(f"{name}: {shape}" for name, shape in states.items())
        count = f" × {len(entry)}" if len(entry) > 1 else ""
        grid.add_row(Text(_path(entry, entry.path) + count), Text(_path(entry, entry.module, "{{{}}}")), Text(shapes))
    head = Text.assemble((text, "bold"), " on ", (table.model_id, "bold"), f"  ({total:,} site{'s' * (total != 1)})")
    return Group(head, Text(), grid)


def _path(entry: PlanSiteRange, path: str, form: str = "{}") -> str:
    """`layer[0..11]`, or of modules `layers.{0..11}`."""
    for word, numbers in ((LAYER, entry.layers), (NUMBER, entry.numbers)):
        if numbers is not None:
            path = path.replace(word, form.format(f"{numbers[0]}..{numbers[1]}"))
    return path
