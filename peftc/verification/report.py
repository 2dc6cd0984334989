"""The result of a verification as plain data and as a table."""

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peftc.diagnostics import Diagnostic
from peftc.planning.report.plan import plain_text

Outcome = Literal["holds", "fails", "not checked"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NotWitnessed(_Record):
    """A site whose equation could not be evaluated on the base.

    Attributes:
        site: its path.
        reason: why.
    """

    site: str
    reason: str


class VerifiedEdit(_Record):
    """One edit, and what was checked at how many of its sites.

    Attributes:
        name: of the edit.
        sites: how many it has.
        witnessed: sites whose equations were evaluated on the base.
        perturbed: sites whose parameters were changed alone.
        inert: those of them whose parameters have no effect at present, for instance because no
            entries are selected yet.
        not_witnessed: the other sites, with the reasons.
    """

    name: str
    sites: int
    witnessed: int
    perturbed: int
    inert: int
    not_witnessed: tuple[NotWitnessed, ...]


class Check(_Record):
    """A property of the whole model.

    Attributes:
        name: the property.
        outcome: "holds", "fails" or "not checked".
        detail: a difference, a count, or why it is not checked.
    """

    name: str
    outcome: Outcome
    detail: str


class Finding(_Record):
    """A property that does not hold.

    Attributes:
        code: P602-P611.
        message: the property and the difference.
        edit: the edit concerned, if it is one.
        site: the path of the site.
        state: the hidden state at the site.
        module: the dotted name of the module in whose inputs it was first seen.
        size: the largest absolute difference.
    """

    code: str
    message: str
    edit: str | None = None
    site: str | None = None
    state: str | None = None
    module: str | None = None
    size: float | None = None

    def diagnostic(self) -> Diagnostic:
        """The finding as a diagnostic."""
        notes = [f"edit `{self.edit}` at `{self.site}`, state `{self.state}`"] if self.edit else []
        notes += [f"first seen in the inputs of `{self.module}`"] if self.module else []
        return Diagnostic(self.code, self.message, notes=tuple(notes))


class Verification(_Record):
    """The outcome of `peftc.verify`.

    Attributes:
        model: the name of the model.
        weights: where they come from.
        batch: the shapes of the inputs, by name.
        edits: what was checked at the sites of each edit.
        checks: the properties of the whole model.
        findings: the faults; empty if all is well.
    """

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
        """The number of sites whose equations were evaluated on the base."""
        return sum(edit.witnessed for edit in self.edits)

    @property
    def sites(self) -> int:
        """The number of sites of all edits."""
        return sum(edit.sites for edit in self.edits)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """The findings as diagnostics."""
        return tuple(finding.diagnostic() for finding in self.findings)

    def __str__(self) -> str:
        return plain_text(render_verification(self), 80)


STYLE = {"holds": "green", "fails": "bold red", "not checked": "yellow"}


def render_verification(verification: Verification) -> RenderableType:
    """A header, the sites of every edit, the checks, and the findings."""
    batch = ", ".join(f"{name} {list(shape)}" for name, shape in verification.batch.items())
    header = Text.assemble((verification.model, "bold"), f"\n{verification.weights}; {batch}")
    parts: list[RenderableType] = [header, Text(), _edits(verification), Text(), _checks(verification)]
    reasons = Counter(site.reason for edit in verification.edits for site in edit.not_witnessed)
    if reasons:
        lines = [f"{count} × {reason}" for reason, count in reasons.items()]
        parts += [Text(), Text("not witnessed", "bold"), Text("\n".join(lines))]
    for finding in verification.findings:
        message = "\n  ".join([finding.message, *finding.diagnostic().notes])
        parts += [Text(), Text.assemble((f"{finding.code}: ", "bold red"), message)]
    return Group(*parts)


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
    for overflow in ("ellipsis", "fold", "fold"):
        table.add_column(overflow=overflow)
    for check in verification.checks:
        table.add_row(Text(check.outcome, STYLE[check.outcome]), Text(check.name), Text(check.detail, "dim"))
    return table
