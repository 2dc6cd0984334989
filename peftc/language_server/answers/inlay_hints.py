"""Behind each edit, the sites and the parameters that it has on the models of the text."""

from __future__ import annotations

from collections.abc import Iterator

from lsprotocol import types

from peftc.language_server.analysis import Analysis
from peftc.language_server.answers.plans import EditPlan, planned_names, plans_of_edit


def inlay_hints(analysis: Analysis, start: int, end: int) -> Iterator[types.InlayHint]:
    """The hints between two offsets: `24 sites · 1,179,648 parameters`, of each model."""
    positions = analysis.document.positions
    for name, whole in sorted(planned_names(analysis).items()):
        plans = [*plans_of_edit(analysis, name)]
        if plans and start <= whole.end and whole.start <= end:
            hint = types.InlayHint(positions.position(whole.end), _label(plans), padding_left=True)
            hint.tooltip = "\n".join(f"{plan.model}: {plan.details()}" for plan in plans)
            yield hint


def _label(plans: list[EditPlan]) -> str:
    if len(plans) == 1:
        return plans[0].summary()
    return " | ".join(f"{plan.model}: {plan.summary()}" for plan in plans)
