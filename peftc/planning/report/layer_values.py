"""What of an edit differs by layer, and at which sites it is not, in a plan."""

from __future__ import annotations

from itertools import groupby

from peftc.planning.report.plan_sites import PlanSites, Record

_MOST_GROUPS, _ENDS = 6, 2  # of equal values that a line has, and those of which it has more


class PlanLayerValues(Record):
    """Values that differ by layer: an argument of a form, or a number of an equation.

    Attributes:
        name: `r of lora`, or the number as it is written.
        stack: the path of the layers, without their numbers.
        layers: the numbers of those with a site of the edit.
        values: as they are written, one for each of these layers.
    """

    name: str
    stack: str
    layers: tuple[int, ...]
    values: tuple[str, ...]

    def __str__(self) -> str:
        pairs = zip(self.layers, self.values, strict=True)
        groups = [(value, [layer for layer, _ in own]) for value, own in groupby(pairs, lambda pair: pair[1])]
        if len(groups) <= _MOST_GROUPS:
            texts = [f"{value} at {_numbers(layers)}" for value, layers in groups]
        else:
            ends = (*groups[:_ENDS], *groups[-_ENDS:])
            texts = [f"{value} at {_numbers(layers)}" for value, layers in ends]
            texts.insert(_ENDS, "…")
        return f"{self.name} in {self.stack}: {', '.join(texts)}"


class PlanExcluded(Record):
    """Sites of a selector that a condition excludes.

    Attributes:
        where: the condition, as the formatter prints it.
        sites: as in `PlanEdit`.
    """

    where: str
    sites: PlanSites


def _numbers(layers: list[int]) -> str:
    """`[3]`, `[0..5]`, or with gaps `[0, 2]`."""
    runs = groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return f"[{', '.join(str(run[0]) if len(run) == 1 else f'{run[0]}..{run[-1]}' for run in ends)}]"
