"""The Plan: what the compiler will do, as plain data that can be read, printed as JSON and compared."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


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
        from peftc.planning.report.text import plan_text

        return plan_text(self)
