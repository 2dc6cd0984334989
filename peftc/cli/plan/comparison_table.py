"""The table of several plans: the counts of each, or each on each model."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.diagnostics import Diagnostic
from peftc.diagnostics.diagnostic import printable
from peftc.diagnostics.suggestions import plural
from peftc.planning.report.plan import Fitting, Plan, counts_text, percent
from peftc.syntax.vocabulary import PLAN_COUNTS

_GAP = 2  # blanks between columns
_NAME_WIDTHS = (30, 16)  # the most characters of a line of a name; where there is less room


class Cell(NamedTuple):
    """The plan of a spec on a model, if there is one, and what there is to say of it."""

    plan: Plan | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> str:
        """The codes of its errors: `P201, P304`."""
        return ", ".join(dict.fromkeys(one.code for one in self.diagnostics if one.severity == "error"))

    @property
    def sites(self) -> int:
        return sum(len(edit.sites) for edit in self.plan.edits) if self.plan else 0


Rows = Sequence[Sequence[Cell]]


def render_comparison(specs: Sequence[str], models: Sequence[str], rows: Rows, width: int) -> RenderableType:
    """All counts of the methods on one model; on several, what is trained at how many sites."""
    names = names_of(specs)
    parts: list[RenderableType] = [_about(models[i], [row[i] for row in rows]) for i in range(len(models))]
    columns = max((len(line) for i in range(len(models)) for line in _column(models, rows, i)), default=0)
    name_width = min(max(map(len, (*names, "method"))), _NAME_WIDTHS[0])
    number = max(1, (width - name_width) // (columns + _GAP))
    blocks = [
        _matrix(names, models, rows, range(i, min(i + number, len(models)))) for i in range(0, len(models), number)
    ]
    caption = Text("\ntrained parameters, their share of the base, and sites")
    by_model = Group(caption, *(part for block in blocks for part in (Text(), block)))
    if len(models) > 1:
        return Group(*parts, by_model)
    tables = [_counts(names, [row[0] for row in rows], name_width) for name_width in _NAME_WIDTHS]
    return Group(*parts, Fitting(Group(Text(), tables[0]), Fitting(Group(Text(), tables[1]), by_model)))


def names_of(specs: Sequence[str]) -> list[str]:
    """The names of files without endings, where these differ; else the paths."""
    stems = [os.path.splitext(os.path.basename(spec))[0] for spec in specs]
    return list(map(printable, stems if len({*stems}) == len(specs) else specs))


def _about(model: str, column: Iterable[Cell]) -> Text:
    """`gpt2  (gpt2, 124,439,808 parameters)`"""
    plan = next((cell.plan for cell in column if cell.plan), None)
    about = f"  ({plan.model.type}, {plan.model.parameters:,} parameters)" if plan else ""
    return Text.assemble((printable(model), "bold"), about)


def _counts(names: Sequence[str], cells: Sequence[Cell], name_width: int) -> Table:
    """Methods × counts."""
    table = _table(name_width, "sites", *PLAN_COUNTS)
    for name, cell in zip(names, cells, strict=True):
        sites = Text(f"{cell.sites:,}" if cell.plan else "")
        if cell.errors:
            sites.append(f"\n{cell.errors}" if cell.plan else cell.errors, "bold red")
        counts = counts_text(cell.plan.totals, cell.plan.totals.base) if cell.plan else ()
        table.add_row(Text(name), sites, *counts)
    return table


def _matrix(names: Sequence[str], models: Sequence[str], rows: Rows, columns: Iterable[int]) -> Table:
    """Methods × models."""
    columns = list(columns)
    table = _table(_NAME_WIDTHS[0], *("\n".join(_lines(models[i])) for i in columns))
    for name, row in zip(names, rows, strict=True):
        table.add_row(Text(name), *(_cell(row[i]) for i in columns))
    return table


def _table(name_width: int, *headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("method", overflow="fold", max_width=name_width)
    for header in headers:
        table.add_column(Text(header), justify="right")
    return table


def _cell(cell: Cell) -> Text:
    if cell.plan is None:
        return Text(cell.errors, "bold red")
    trained, base = cell.plan.totals.trained, cell.plan.totals.base
    share = (percent(trained, base), "dim")
    failed = ("\n" + cell.errors, "bold red") if cell.errors else ""
    return Text.assemble(f"{trained:,}\n", share, f"\n{plural(cell.sites, 'site')}", failed)


def _lines(model: str) -> list[str]:
    """The name of a model, a line for each part: `facebook/` and `bart-large`."""
    *folders, last = printable(model).split("/")
    return [*(f"{folder}/" for folder in folders), last]


def _column(models: Sequence[str], rows: Rows, column: int) -> Iterator[str]:
    """The lines of a column of models."""
    yield from _lines(models[column])
    for row in rows:
        yield from _cell(row[column]).plain.splitlines()
