"""The difference of two records, edit by edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from peftc.addressing.paths import compress_paths
from peftc.comparison.record import EditOnModel, EditText, PlanRecord, SpecRecord
from peftc.planning.report.plan_sites import PlanSites, Record
from peftc.syntax.vocabulary import PLAN_COUNTS

SCALARS = (*PLAN_COUNTS, "foldable", "identity")


class Difference(Record):
    """What differs in one respect.

    Attributes:
        name: of the respect: `at`, `equations`, `sites`, `modules`, `shapes`, `order`, a count of
            the plan, `foldable`, `identity`; outside of edits also `model`, `parameters`,
            `architecture`, `values`, `moves`, `expectations`, and `form NAME`.
        old: lines, paths or a number that the new side does not have.
        new: those that the old side does not have.
    """

    name: str
    old: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


class EditDifference(Record):
    """What differs in one edit.

    Attributes:
        name: of the edit.
        change: whether only one side has the edit.
        differences: in its text, and on the model.
    """

    name: str
    change: Literal["added", "removed", "changed"]
    differences: tuple[Difference, ...]


class SpecDifference(Record):
    """What differs between two specs, or between what two specs do to a model.

    Attributes:
        format_version: of this data.
        old: the label of the first.
        new: the label of the second.
        model: the base, if sites and counts are compared; else None.
        edits: those that differ.
        others: what differs outside of edits.
    """

    format_version: Literal["1.0"] = "1.0"
    old: str
    new: str
    model: str | None = None
    edits: tuple[EditDifference, ...] = ()
    others: tuple[Difference, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not self.edits and not self.others


Texts = tuple[SpecRecord, SpecRecord]
Plans = tuple[PlanRecord, PlanRecord]


def difference(labels: tuple[str, str], texts: Texts, plans: Plans | None = None) -> SpecDifference:
    """What differs in two expanded specs, and in their plans."""
    return SpecDifference(
        old=labels[0],
        new=labels[1],
        model=None if plans is None else plans[1].model.id,
        edits=tuple(_edits(texts, plans)),
        others=tuple(_others(texts, plans)),
    )


def _edits(texts: Texts, plans: Plans | None) -> Iterable[EditDifference]:
    old, new = ({edit.name: edit for edit in text.edits} for text in texts)
    on_model = [{edit.name: edit for edit in plan.edits} for plan in plans or ()] or [{}, {}]
    for name in dict.fromkeys((*new, *old)):
        differences = [*_text(old.get(name), new.get(name)), *_on_model(on_model[0].get(name), on_model[1].get(name))]
        if differences:
            change = "added" if name not in old else "removed" if name not in new else "changed"
            yield EditDifference(name=name, change=change, differences=tuple(differences))


def _text(old: EditText | None, new: EditText | None) -> Iterable[Difference]:
    yield from _lines("at", (old.at,) if old else (), (new.at,) if new else ())
    yield from _lines("equations", old.body if old else (), new.body if new else ())


def _on_model(old: EditOnModel | None, new: EditOnModel | None) -> Iterable[Difference]:
    if old is None and new is None:
        return
    yield from _sites(old.sites if old else PlanSites(), new.sites if new else PlanSites())
    yield from _lines("shapes", old.shapes if old else (), new.shapes if new else ())
    for name in SCALARS:
        yield from _scalar(name, getattr(old, name, None), getattr(new, name, None))


def _sites(old: PlanSites, new: PlanSites) -> Iterable[Difference]:
    if old == new:
        return
    modules = [{site.path: site.module for site in sites} for sites in (old, new)]
    before, after = modules
    removed, added = ([path for path in one if path not in other] for one, other in ((before, after), (after, before)))
    if removed or added:
        yield Difference(name="sites", old=_compressed(removed), new=_compressed(added))
    moved = [path for path in after if path in before and before[path] != after[path]]
    if moved:
        yield Difference(name="modules", **{
            side: _compressed([one[path] for path in moved])
            for side, one in (("old", before), ("new", after))
        })  # fmt: skip


def _compressed(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{path} × {count}" if count > 1 else path for path, count in compress_paths(paths))


def _others(texts: Texts, plans: Plans | None) -> Iterable[Difference]:
    old, new = texts
    orders = [[edit.name for edit in text.edits] for text in texts]
    common = [[name for name in order if name in set(orders[0]) & set(orders[1])] for order in orders]
    if common[0] != common[1]:
        yield Difference(name="order", old=tuple(common[0]), new=tuple(common[1]))
    yield from _lines("values", old.values, new.values)
    yield from _lines("moves", old.moves, new.moves)
    for name in dict.fromkeys((*old.forms, *new.forms)):
        yield from _lines(f"form {name}", _form_lines(old.forms, name), _form_lines(new.forms, name))
    if plans is None:
        yield from _lines("expectations", old.expectations, new.expectations)
        return
    before, after = plans
    yield from _lines("expectations", *(_outcomes(plan) for plan in plans))
    for name, attribute in (("model", "id"), ("parameters", "parameters"), ("architecture", "fingerprint")):
        yield from _scalar(name, getattr(before.model, attribute), getattr(after.model, attribute))
    for name in PLAN_COUNTS:
        yield from _scalar(name, getattr(before.totals, name), getattr(after.totals, name))


def _form_lines(forms: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(forms.get(name, "").splitlines())


def _outcomes(plan: PlanRecord) -> tuple[str, ...]:
    return tuple(f"{one.text} {'holds' if one.holds else 'fails'}" for one in plan.expectations)


def _lines(name: str, old: Sequence[str], new: Sequence[str]) -> Iterable[Difference]:
    """Lines of one side alone. If all lines are on both sides, in another order, all of them."""
    if tuple(old) == tuple(new):
        return
    removed, added = ([line for line in one if line not in other] for one, other in ((old, new), (new, old)))
    yield Difference(
        name=name,
        old=tuple(removed if removed or added else old),
        new=tuple(added if removed or added else new),
    )


def _scalar(name: str, old: object, new: object) -> Iterable[Difference]:
    if old != new:
        yield Difference(name=name, old=_value(old), new=_value(new))


def _value(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return ("yes" if value else "no",)
    return (f"{value:,}" if isinstance(value, int) else str(value),)
