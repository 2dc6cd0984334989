"""Whether each edit folds, into what, and what stands in its way: methods of folding applied to placed edits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from peftc.addressing.parameter_ranges import EntryChoice, Parameters, RowRange, used_ties
from peftc.addressing.sites import Site, SiteTable, WeightRef
from peftc.planning.foldability import weight_change
from peftc.planning.foldability.affine import FoldTarget, fold_reason, fold_target, parameter_names
from peftc.planning.ir import Arithmetic, Concat, FormCall, FrozenCall, Read, SiteEdit, Term


@dataclass(frozen=True)
class Foldability:
    """`reason`: into what an edit folds and by what rank, or the sub-expression (or the edit) that prevents it."""

    foldable: bool
    reason: str
    changed: frozenset[RowRange | EntryChoice] = frozenset()


@dataclass(frozen=True, eq=False)
class _At:
    """One placed edit with its fold: `obstacle` says why it cannot be, `order` where its edit stands in the spec."""

    placed: SiteEdit
    order: int
    target: FoldTarget | None
    obstacle: str | None


def check_foldability(
    edits: Sequence[Sequence[SiteEdit]], table: SiteTable, staying: Mapping[str, str] | None = None
) -> list[Foldability]:
    """One verdict for each edit (given as its places, in the order of the spec).

    An edit folds when it folds at all its sites, and nothing that stays behind comes between it and the weight.
    `staying`: edits that stay whatever their equations say, each with the reason.
    """
    sites = {site.path: site for site in table.sites}
    found = [
        [
            _at(use, order, sites, table, own)
            for placed in places
            for own in [_own(placed, sites)]
            for use in placed.uses()
        ]
        for order, places in enumerate(edits)
    ]
    for order, places in enumerate(found):
        reason = (staying or {}).get(places[0].placed.edit) if places else None
        if reason is not None:
            found[order] = [_At(at.placed, order, at.target, reason) for at in places]
    while blocked := _blocked(found):  # an edit that stays may hold back another
        for order, reason in blocked.items():
            found[order] = [_At(at.placed, order, at.target, at.obstacle or reason) for at in found[order]]
    parameters = Parameters(table)
    return [_verdict(places, parameters) for places in found]


def _own(placed: SiteEdit, sites: Mapping[str, Site]) -> frozenset[str]:
    """The names of the parameters that an edit folds into, at all the sites of its module."""
    targets = [target for use in placed.uses() if not isinstance(target := fold_target(use, sites), str)]
    return frozenset(name for target in targets for name in parameter_names(target))


def _at(placed: SiteEdit, order: int, sites: Mapping[str, Site], table: SiteTable, own: Collection[str]) -> _At:
    target = fold_target(placed, sites)
    obstacle = fold_reason(placed, sites, used_ties(table), table.overlaps, own, table.external_reads)
    return _At(placed, order, None if isinstance(target, str) else target, obstacle)


def _verdict(places: Sequence[_At], parameters: Parameters) -> Foldability:
    obstacles = [(at.placed.site.path, at.obstacle) for at in places if at.obstacle is not None]
    if obstacles:
        path, reason = obstacles[0]
        some = len(obstacles) < len(places)
        return Foldability(
            False, f"{reason} (at {len(obstacles)} of {len(places)} sites, such as {path})" if some else reason
        )
    targets = [(at.placed, at.target) for at in places if at.target is not None]
    regions = frozenset(
        region for placed, target in targets for region in weight_change.changed(placed, target, parameters)
    )
    return Foldability(True, _into(targets), regions)


def _into(targets: Sequence[tuple[SiteEdit, FoldTarget]]) -> str:
    refs = dict.fromkeys(_name(target) for _, target in targets)
    names = list(refs)
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    ranks = {weight_change.rank(placed) for placed, target in targets if target.side != "input"}
    rank = next(iter(ranks)) if len(ranks) == 1 and len({t.side for _, t in targets}) == 1 else None
    return f"into {text}" + (f", rank {rank}" if rank else "")


def _name(target: FoldTarget) -> str:
    ref: WeightRef | None = target.weight or target.bias
    name = target.site.module.rpartition(".")[2].strip('"')
    text = f"rows of {name}" if ref is not None and ref.rows is not None else name
    return f"columns of {text}" if target.side == "input" else text


# Edits between an edit and its weight --------------------------------------------------------------------------------


def _blocked(found: Sequence[Sequence[_At]]) -> dict[int, str]:
    """The foldable edits that an edit which stays holds back, with the reason; by their order."""
    stays = [at for places in found if any(at.obstacle for at in places) for at in places]
    near: dict[str, list[_At]] = defaultdict(list)
    for at in stays:
        for place in {at.placed.site.root, *(ref.module for ref in _written(at))}:  # a weight lies in its module
            near[place].append(at)
    common = {owner: at.placed.edit for at in stays for owner in _numbered(at.placed)}
    blocked: dict[int, str] = {}
    for order, places in enumerate(found):
        if any(at.obstacle for at in places):
            continue
        if other := next((common[o] for at in places for o in _numbered(at.placed) if o in common), None):
            blocked[order] = f"`{other}`, which stays, shares parameters with it"
        for at in places:
            around = [*near[at.placed.site.root], *near[_module(at)]]
            between = next((other for other in around if _between(other, at)), None)
            if between is not None:
                blocked[order] = f"`{between.placed.edit}`, which does not fold, stands between it and the weight"
    return blocked


def _numbered(placed: SiteEdit) -> list[str]:
    """What an edit has in common with others that is made for all their sites together (the widest, or one after the other)."""
    return [one.owner for one in placed.instances if one.owner and one.form.common(one.args) is not None]


def _between(stays: _At, folds: _At) -> bool:
    """Whether `stays` would see other values if `folds` went into the weight."""
    target = folds.target
    if target is None:
        return False
    if any(_same_rows(ref, own) for ref in _written(stays) for own in _refs(target)):  # w and b come before h
        return target.side != "weight" or stays.order < folds.order
    if target.side == "weight":
        return False
    if target.side == "output":
        return _writes(stays, "h", _outputs(folds)) and _precedes(stays, folds)
    changed_input = {(target.site.path, "x"), (folds.placed.site.path, "h"), (folds.placed.site.path, "z")}
    changed_input |= {(f"{_above(target.site.path)}.hidden", "h"), (_above(target.site.path), "z")}
    if _writes(stays, "h", {f"{_above(target.site.path)}.hidden"}) or _writes(stays, "z", {_above(target.site.path)}):
        return _turn(stays) > _turn(folds)
    return any((stays.placed.site.path, state) in changed_input for state in _read(stays.placed))


def _written(at: _At) -> list[WeightRef]:
    """The weights and biases that the edit writes."""
    states = (at.placed.site.states[assign.state] for assign in at.placed.assigns)
    return [state.weight for state in states if state.weight is not None]


def _refs(target: FoldTarget) -> list[WeightRef]:
    return [ref for ref in (target.weight, target.bias) if ref is not None]


def _same_rows(one: WeightRef, other: WeightRef) -> bool:
    """Whether two views of a module's parameters have rows in common."""
    if one.module != other.module:
        return False
    if (
        one.stacked_slice
        and other.stacked_slice
        and (one.attribute, one.stacked_slice) != (other.attribute, other.stacked_slice)
    ):
        return False
    return not (one.rows and other.rows) or one.rows.overlaps(other.rows)


def _module(at: _At) -> str:
    """The module that the edit folds into."""
    return next((ref.module for ref in _refs(at.target)), "") if at.target else ""


def _writes(at: _At, state: str, paths: Iterable[str]) -> bool:
    return at.placed.site.path in set(paths) and any(assign.state == state for assign in at.placed.assigns)


def _outputs(at: _At) -> set[str]:
    """The sites whose `h` is the output of the Linear that `at` folds into: the Linear, and the sub-layer it ends."""
    assert at.target is not None
    return {at.target.site.path, at.placed.site.path, _above(at.target.site.path)}


def _precedes(first: _At, then: _At) -> bool:
    same = first.placed.site.path == then.placed.site.path
    if same:
        return first.order < then.order
    assert then.target is not None
    return first.placed.site.path == then.target.site.path


def _turn(at: _At) -> tuple[int, int]:
    """When it acts, among edits of one state: inner sites first, then in the order of the spec."""
    return -at.placed.site.path.count("."), at.order


def _above(path: str) -> str:
    return path.rpartition(".")[0]


def _read(placed: SiteEdit) -> set[str]:
    terms = [assign.value for assign in placed.assigns] + [term for _, term in placed.lets]
    return {state for term in terms for state in _states(term)}


def _states(term: Term) -> Iterable[str]:
    match term:
        case Read(state=state):
            yield state
        case Arithmetic(left=left, right=right):
            yield from (*_states(left), *_states(right))
        case FormCall(inputs=values):
            for value in values:
                yield from _states(value)
        case FrozenCall(input=value):
            yield from _states(value)
        case Concat(parts=parts):
            for part in parts:
                yield from _states(part)
        case _:
            return
