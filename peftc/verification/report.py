"""What a verification has shown: plain data, and a table for people."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.diagnostics import Diagnostic
from peftc.planning.report.text import plain_text

Outcome = Literal["holds", "fails", "not checked"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NotWitnessed(_Part):
    """A site whose equation could not be computed on the base, and why."""

    site: str
    reason: str


class VerifiedEdit(_Part):
    """One edit. `sites`: all of them; `perturbed`: those whose parameters were changed alone; `inert`: of these, those whose
    parameters change nothing at present, such as entries that nobody has chosen yet.
    """

    name: str
    sites: int
    witnessed: int
    perturbed: int
    inert: int
    not_witnessed: tuple[NotWitnessed, ...]


class Check(_Part):
    """One property of the whole model. `detail`: the largest difference, or why it was not checked."""

    name: str
    outcome: Outcome
    detail: str


class Finding(_Part):
    """A property that does not hold: the code, and where the first difference is. `size` is absolute."""

    code: str
    message: str
    edit: str | None = None
    site: str | None = None
    state: str | None = None
    module: str | None = None
    size: float | None = None

    def diagnostic(self) -> Diagnostic:
        said = [
            f"edit `{self.edit}` at `{self.site}`, state `{self.state}`" if self.edit else "",
            f"first seen in what `{self.module}` takes" if self.module else "",
        ]
        return Diagnostic(self.code, self.message, notes=tuple(text for text in said if text))


class Verification(_Part):
    """The outcome of `peftc.verify`."""

    format_version: Literal["1.0"] = "1.0"
    model: str
    weights: str
    batch: dict[str, tuple[int, ...]]
    edits: tuple[VerifiedEdit, ...]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def witnessed(self) -> int:
        """The sites whose equations were computed on the base."""
        return sum(edit.witnessed for edit in self.edits)

    @property
    def sites(self) -> int:
        return sum(edit.sites for edit in self.edits)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return tuple(finding.diagnostic() for finding in self.findings)

    def __str__(self) -> str:
        return verification_text(self)


STYLE = {"holds": "green", "fails": "bold red", "not checked": "yellow"}


def verification_text(verification: Verification, width: int = 80) -> str:
    """The verification as plain text without colours."""
    return plain_text(render_verification(verification), width)


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
