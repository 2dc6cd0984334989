"""A verification as a table."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.planning.report.text import plain
from peftc.verification.report import Verification

STYLE = {"holds": "green", "fails": "bold red", "not checked": "yellow"}


def verification_text(verification: Verification, width: int = 80) -> str:
    """The verification as plain text without colours."""
    return plain(render_verification(verification), width)


def render_verification(verification: Verification) -> RenderableType:
    """A header, the sites of every edit, the properties that were checked, and what was found."""
    parts: list[RenderableType] = [_header(verification), Text(), _edits(verification), Text(), _checks(verification)]
    reasons = Counter(one.reason for edit in verification.edits for one in edit.not_witnessed)
    if reasons:
        lines = [f"{count} × {reason}" for reason, count in reasons.items()]
        parts += [Text(), Text("not witnessed", "bold"), Text("\n".join(lines))]
    for finding in verification.findings:
        found = finding.diagnostic()
        parts += [Text(), Text.assemble((f"{found.code}: ", "bold red"), "\n  ".join([found.message, *found.notes]))]
    return Group(*parts)


def _header(verification: Verification) -> Text:
    batch = ", ".join(f"{name} {list(shape)}" for name, shape in verification.batch.items())
    return Text.assemble((verification.model, "bold"), f"\n{verification.weights}; {batch}")


def _edits(verification: Verification) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("edit", overflow="fold")
    for name in ("sites", "witnessed", "perturbed", "inert"):
        table.add_column(name, justify="right")
    for edit in verification.edits:
        table.add_row(Text(edit.name), *map(str, (edit.sites, edit.witnessed, edit.perturbed, edit.inert)))
    return table


def _checks(verification: Verification) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for check in verification.checks:
        table.add_row(Text(check.outcome, STYLE[check.outcome]), Text(check.name), Text(check.detail, "dim"))
    return table
