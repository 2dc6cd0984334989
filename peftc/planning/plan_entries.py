"""The counts and facts of a plan: of each edit and `train` statement, and of all of them."""

from collections.abc import Iterable, Sequence

from peftc.addressing.parameter_ranges import EntryChoice, RowRange, numel, weighted_numel
from peftc.planning.assignments import is_identity
from peftc.planning.foldability.check import Foldability
from peftc.planning.ir import SiteEdit
from peftc.planning.lowering_context import count_parameters
from peftc.planning.report.layer_values import PlanExcluded, PlanLayerValues
from peftc.planning.report.plan import PlanEdit, PlanTotals
from peftc.planning.report.plan_sites import PlanSites
from peftc.planning.selection.train import TrainTarget
from peftc.syntax import ast

Lowered = list[tuple[ast.Edit, list[SiteEdit]]]


def edit_entry(
    edit: ast.Edit,
    site_edits: Sequence[SiteEdit],
    fold: Foldability,
    sites: PlanSites,
    by_layer: Iterable[PlanLayerValues],
    excluded: PlanExcluded | None,
) -> PlanEdit:
    count = count_parameters(site_edits)
    return PlanEdit(
        name=edit.name,
        sites=sites,
        trained=count.trained,
        stored=count.stored,
        changed=weighted_numel(fold.changed),
        served=0 if fold.foldable else count.stored,
        foldable=fold.foldable,
        reason=fold.reason,
        identity=all(map(is_identity, site_edits)),
        by_layer=tuple(by_layer),
        excluded=excluded,
    )


IN_PLACE = "trains parameters of the base in place"  # why `train` folds


def train_entry(target: TrainTarget, sites: PlanSites, excluded: PlanExcluded | None) -> PlanEdit:
    total = numel(target.ranges)
    values = total * (len(target.adapters) or 1)
    return PlanEdit(
        name=target.name,
        sites=sites,
        trained=values,
        stored=values,
        changed=0 if target.adapters else total,
        served=values if target.adapters else 0,
        foldable=not target.adapters,
        reason="attached adapters have values of their own" if target.adapters else IN_PLACE,
        identity=True,
        excluded=excluded,
    )


def plan_totals(
    edits: Lowered, foldability: Sequence[Foldability], trains: Iterable[TrainTarget], base: int
) -> PlanTotals:
    """Counts over the whole plan: shared parameters and entries of the base count once."""
    trains = tuple(trains)
    base_ranges = frozenset[RowRange]().union(*(target.ranges for target in trains if not target.adapters))
    attached = sum(numel(target.ranges) * len(target.adapters) for target in trains)
    changed: dict[RowRange | EntryChoice, int] = dict.fromkeys(base_ranges, 1)
    for fold in foldability:
        changed |= fold.changed
    folds = list(zip(edits, foldability, strict=True))
    count = count_parameters(site_edit for _, site_edits in edits for site_edit in site_edits)
    served = count_parameters(e for (_, site_edits), fold in folds if not fold.foldable for e in site_edits)
    return PlanTotals(
        base=base,
        trained=count.trained + numel(base_ranges) + attached,
        stored=count.stored + numel(base_ranges) + attached,
        changed=weighted_numel(changed),
        served=served.stored + attached,
    )
