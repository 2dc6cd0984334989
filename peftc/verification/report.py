"""What a verification has shown, as plain data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from peftc.diagnostics import Diagnostic

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
        from peftc.verification.render import verification_text

        return verification_text(self)
