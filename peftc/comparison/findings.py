"""What breaks adapters: the records that `peftc breaking` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from peftc.addressing.paths import compress_paths
from peftc.comparison.meaning import EditMeaning
from peftc.diagnostics import Diagnostic
from peftc.planning.planner import PlanResult
from peftc.planning.report.plan_sites import Record

Category = Literal["LOAD", "NUMERIC", "FOLD"]
Sizes = Mapping[str, tuple[int, ...]]  # of the tensors of an adapter, by name
Edits = tuple[Mapping[str, EditMeaning], Mapping[str, EditMeaning]]  # of the old and the new spec


class Finding(Record):
    """One way in which adapters break.

    Attributes:
        category: LOAD: they are refused. NUMERIC: they load, and the model computes something else.
            FOLD: an edit that could be folded into the weights cannot be folded any more.
        edit: the edit of the new spec, or of the old one if only that has it; None for the spec.
        parameters: what of the edit does not load, without the site, with sizes.
        sites: where.
        reason: what has changed.
        help: the way out.
    """

    category: Category
    edit: str | None
    parameters: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    reason: str
    help: str


class Comparison(Record):
    """The findings of one pair of specs.

    Attributes:
        old: the label of the spec that adapters were saved under.
        new: the label of the other.
        model: the base, if tensors and sites are compared on one; else None.
        findings: in the order of the categories, then of the edits.
    """

    old: str
    new: str
    model: str | None = None
    findings: tuple[Finding, ...] = ()


class BreakingReport(Record):
    """What `peftc breaking` prints.

    Attributes:
        format_version: of this data.
        comparisons: of each pair of specs.
    """

    format_version: Literal["1.0"] = "1.0"
    comparisons: tuple[Comparison, ...]

    @property
    def is_empty(self) -> bool:
        """Whether nothing breaks."""
        return not any(one.findings for one in self.comparisons)


class OnModel(NamedTuple):
    """A spec of what is saved, on a model.

    Attributes:
        planned: its plan.
        sizes: of the tensors that its adapters have.
        failed: expectations of the spec that do not hold.
    """

    planned: PlanResult
    sizes: Sizes
    failed: tuple[Diagnostic, ...] = ()


OWN_SPEC = "`peftc.load(adapter, model)` loads it under the spec that it holds"
NEW_NAME = f"give what is new another name and keep `{{}}` as it was; {OWN_SPEC}"
SAME = "if these are the same parameters, say so: "
MOVED = f"{SAME}`{{}}`"


def compressed(paths: Iterable[str]) -> tuple[str, ...]:
    """`encoder.layer[0..5].ffn × 6`, for the sites of a finding."""
    return tuple(f"{path} × {count}" if count > 1 else path for path, count in compress_paths(list(paths)))
