"""What a fold did, and what it refused."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """What became of one parameter of the base.

    Attributes:
        parameter: its dotted name.
        total: how many entries it has.
        entries: how many of them differ now.
        survived: the part of the entries with a change that still differ after rounding to the
            parameter's dtype.
        dtype: of the parameter, such as "bfloat16".
        created: it is a bias that was not there before, a new key of the state dict.
        edits: all that were folded into it. If there are several, the numbers are of all together.
        delta: ‖Δ‖ / ‖W‖, the size of the change relative to the parameter; infinite where W is 0.
        rounding: ‖ε‖ / ‖Δ‖, the part of the change that rounding to the dtype adds or takes away.
    """

    parameter: str
    total: int
    entries: int
    survived: float
    dtype: str
    created: bool = False
    edits: tuple[str, ...] = ()
    delta: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True)
class Folded:
    """An edit that is in the weights now, at all its sites.

    Attributes:
        edit: its name.
        changes: what became of each parameter.
    """

    edit: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Refused:
    """An edit that stays.

    Attributes:
        edit: its name.
        reason: the sub-expression, the edit or the parameter that prevents it.
    """

    edit: str
    reason: str


@dataclass(frozen=True)
class FoldReport:
    """The outcome of `peftc.fold`, in the order of the spec.

    Attributes:
        folded: the edits that are in the weights now.
        refused: the edits that go on working, with the reasons.
    """

    folded: tuple[Folded, ...]
    refused: tuple[Refused, ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """Each changed parameter once."""
        return tuple({c.parameter: c for folded in self.folded for c in folded.changes}.values())

    def __str__(self) -> str:
        lines = ["nothing was folded"] if not self.folded else []
        for folded in self.folded:
            lines.append(f"folded  {folded.edit}: {_summary(folded.changes)}")
            created = [c.parameter for c in folded.changes if c.created]
            if created:
                more = f" and {len(created) - 1} more" if len(created) > 1 else ""
                lines.append(
                    f"        new biases: {created[0]}{more} (keys of the state dict that the base did not have)"
                )
        lines += [f"refused {refused.edit}: {refused.reason}" for refused in self.refused]
        return "\n".join(lines)


def _summary(changes: Sequence[Change]) -> str:
    if not changes:
        return "it changes nothing"
    entries = sum(c.entries for c in changes)
    text = f"{entries:,} entries of {len(changes)} parameter{'s' * (len(changes) != 1)}"
    changed = sum(c.entries / c.survived if c.survived else c.total for c in changes)
    if entries < round(changed):
        dtypes = " and ".join(dict.fromkeys(c.dtype for c in changes))
        text += f"; {entries / changed:.1%} of the changed entries survived rounding to {dtypes}"
    return text
