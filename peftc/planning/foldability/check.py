"""Which edits fold, into what, which entries of the base change, and what prevents the others."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from peftc.addressing.module_infos import used_ties
from peftc.addressing.parameter_ranges import EntryChoice, Parameters, RowRange
from peftc.addressing.site_list import site_list
from peftc.addressing.sites import SiteTable, Slice, WeightRef
from peftc.equations.definition import TextForm
from peftc.forms.shapes import Weight
from peftc.planning.foldability.affine import (
    FoldTarget,
    affine_structure,
    fold_reason,
    fold_target,
    is_table,
    linear_states,
)
from peftc.planning.ir import Arithmetic, Constant, FormCall, FormInstance, FrozenCall, Read, SiteEdit, Term, subterms


@dataclass(frozen=True)
class Foldability:
    foldable: bool
    reason: str  # into what and by which rank, or the sub-expression or edit that prevents it
    changed: Mapping[RowRange | EntryChoice, int] = field(default_factory=dict)  # entries, and for how many each stands


@dataclass(frozen=True, eq=False)
class _SiteFold:
    site_edit: SiteEdit
    order: int  # of the edit in the spec
    target: FoldTarget | None
    reason: str | None  # why it does not fold

    @property
    def path(self) -> str:
        return self.site_edit.site.path

    @property
    def written(self) -> list[WeightRef]:
        states = (self.site_edit.site.states[assign.state] for assign in self.site_edit.assigns)
        return [state.weight for state in states if state.weight is not None]

    @property
    def own(self) -> list[WeightRef]:
        """The weight at the site: `h` may be the same value at another site of the module."""
        state = self.site_edit.site.states.get("w")
        return [] if state is None or state.weight is None else [state.weight]

    def writes(self, state: str, *paths: str) -> bool:
        return self.path in paths and any(assign.state == state for assign in self.site_edit.assigns)


def check_foldability(
    edits: Sequence[Sequence[SiteEdit]], table: SiteTable, staying: Mapping[str, str] | None = None
) -> list[Foldability]:
    """The foldability of each edit, in order. `staying`: edits that must stay, with the reason.

    An edit folds if it folds at all sites, and no edit that stays acts between it and the weight.
    """
    staying = staying or {}
    folds = [list(_site_folds(site_edits, order, table)) for order, site_edits in enumerate(edits)]
    for order, site_folds in enumerate(folds):
        reason = staying.get(site_folds[0].site_edit.edit) if site_folds else None
        if reason is not None:
            folds[order] = [replace(fold, reason=reason) for fold in site_folds]
    while blocked := _blocked(folds):  # an edit that stays may in turn block another
        for order, reason in blocked.items():
            folds[order] = [replace(fold, reason=fold.reason or reason) for fold in folds[order]]
    parameters = Parameters(table)
    return [_foldability(site_folds, parameters) for site_folds in folds]


def _site_folds(site_edits: Sequence[SiteEdit], order: int, table: SiteTable) -> Iterator[_SiteFold]:
    sites, ties = site_list(table), used_ties(table)
    tied = frozenset[str]().union(*ties)
    for site_edit in site_edits:
        uses = [(use, fold_target(use, sites)) for use in site_edit.uses()]
        targets = [target for _, target in uses if isinstance(target, FoldTarget)]
        edited = frozenset[str]().union(*(target.parameters for target in targets))
        if not tied.isdisjoint(edited):
            same = [fold_target(other, sites) for other in site_edits if is_same_change(site_edit, other)]
            edited = edited.union(*(target.parameters for target in same if isinstance(target, FoldTarget)))
        for use, target in uses:
            reason = fold_reason(use, sites, ties, table.overlaps, edited, table.external_reads)
            yield _SiteFold(use, order, target if isinstance(target, FoldTarget) else None, reason)


def is_same_change(one: SiteEdit, other: SiteEdit) -> bool:
    """Whether an edit changes two weights by one value, so that a fold into weights that are tied
    is one. Both are of one edit, whose equations are those of its text.
    """
    terms = [*one.terms(), *other.terms()]
    return (
        one is not other
        and len(one.instances) == len(other.instances) > 0
        and all(assign.state == "w" and assign.text is None for assign in (*one.assigns, *other.assigns))
        and all(term.state == "w" for term in terms if isinstance(term, Read))
        and all(map(_is_same_value, one.instances, other.instances))
    )


def _is_same_value(one: FormInstance, other: FormInstance) -> bool:
    """Whether two uses of a form have all parameters in common, and one equation."""
    form = one.form
    if one.owner is None or one.owner != other.owner or one.has_site_parameters or one.tasks:
        return False
    return isinstance(form, TextForm) and form.at(one.args, one.dims) is form.at(other.args, other.dims)


def _foldability(folds: Sequence[_SiteFold], parameters: Parameters) -> Foldability:
    reasons = [(fold.path, fold.reason) for fold in folds if fold.reason is not None]
    if reasons:
        path, reason = reasons[0]
        stay = sum(fold.site_edit.count for fold in folds if fold.reason is not None)
        every = sum(fold.site_edit.count for fold in folds)
        some = f" (at {stay} of {every} sites, such as {path})" if stay < every else ""
        return Foldability(False, f"{reason}{some}")
    targets = [(fold.site_edit, fold.target) for fold in folds if fold.target is not None]
    changed = {
        entries: site_edit.count
        for site_edit, target in targets
        for entries in changed_entries(site_edit, target, parameters)
    }
    names = list(dict.fromkeys(_name(target) for _, target in targets))
    text = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    ranks = {rank(site_edit) for site_edit, target in targets if target.side != "input"}
    known = {one for one in ranks if one} if len({target.side for _, target in targets}) == 1 else set[int]()
    ends = "" if not known or known != ranks else f"{min(known)}" + f" to {max(known)}" * (len(known) > 1)
    return Foldability(True, f"into {text}" + (f", rank {ends}" if ends else ""), changed)


def _name(target: FoldTarget) -> str:
    ref = target.weight if target.site.bare else None
    is_named = ref is not None and ref.attribute != "weight"
    name = ref.attribute if ref is not None and is_named else target.site.module.rpartition(".")[2].strip('"')
    text = f"rows of {name}" if target.refs and target.refs[0].rows is not None else name
    return f"columns of {text}" if target.side == "input" else text


def _blocked(folds: Sequence[Sequence[_SiteFold]]) -> dict[int, str]:
    """The foldable edits that another edit prevents from folding, by order, with the reason."""
    stays = [fold for site_folds in folds if any(f.reason for f in site_folds) for fold in site_folds]
    by_module: dict[str, list[_SiteFold]] = defaultdict(list)
    for fold in stays:
        for module in {fold.site_edit.site.root, *(ref.module for ref in (*fold.written, *fold.own))}:
            by_module[module].append(fold)
    shared = {owner: fold.site_edit.edit for fold in stays for owner in _joint_owners(fold.site_edit)}
    calls = {
        t.module: fold.site_edit.edit for fold in stays for t in fold.site_edit.terms() if isinstance(t, FrozenCall)
    }
    blocked: dict[int, str] = {}
    for order, site_folds in enumerate(folds):
        if any(fold.reason for fold in site_folds):
            continue
        for fold in site_folds:
            if owner := next((owner for owner in _joint_owners(fold.site_edit) if owner in shared), None):
                blocked.setdefault(order, f"`{shared[owner]}`, which stays, shares parameters with it")
        for fold in site_folds:
            module = fold.target.refs[0].module if fold.target and fold.target.refs else ""
            if module in calls:
                blocked[order] = f"`{calls[module]}`, which stays, calls this module"
                break
            others = [*by_module[fold.site_edit.site.root], *by_module[module]]
            if (other := next((other for other in others if _between(other, fold)), None)) is not None:
                blocked[order] = f"`{other.site_edit.edit}`, which is not folded, stands between it and the weight"
                break
    return blocked


def _joint_owners(site_edit: SiteEdit) -> list[str]:
    """The owners of parameters that are made for several sites together."""
    return [one.owner for one in site_edit.instances if one.owner and one.form.common(one.args) is not None]


def _between(stays: _SiteFold, folds: _SiteFold) -> bool:
    """Whether the values at `stays` would change if `folds` went into the weight."""
    target = folds.target
    if target is None:
        return False
    if any(_same_rows(written, ref) for written in stays.written for ref in target.refs):
        # Edits of w and b act before those of h.
        return target.side != "weight" or stays.order < folds.order
    if target.side == "weight":
        return False
    sublayer = target.site.path.rpartition(".")[0]
    if target.side == "output":
        is_other = stays.writes("h", stays.path) and stays.path not in (folds.path, target.site.path)
        if is_other and any(_same_rows(own, ref) for own in stays.own for ref in target.refs):
            return _acts_before(stays, folds)  # at another site of the module
        if not stays.writes("h", target.site.path, folds.path, sublayer):
            return False
        return stays.order < folds.order if stays.path == folds.path else stays.path == target.site.path
    hidden = f"{sublayer}.hidden"
    if stays.writes("h", hidden) or stays.writes("z", sublayer):
        # Edits of one state act from inner sites to outer ones, then in the order of the spec.
        return (-stays.path.count("."), stays.order) > (-folds.path.count("."), folds.order)
    changed = {(target.site.path, "x"), (folds.path, "h"), (folds.path, "z"), (hidden, "h"), (sublayer, "z")}
    return any((stays.path, state) in changed for state in stays.site_edit.reads())


def _acts_before(one: _SiteFold, other: _SiteFold) -> bool:
    """Whether an edit acts first of two at a module: of those in its own forward, in their order;
    else from inner sites to outer ones, and then in their order.
    """
    if one.site_edit.site.root == other.site_edit.site.root:
        return one.order < other.order
    return (-one.path.count("."), one.order) < (-other.path.count("."), other.order)


def _same_rows(one: WeightRef, other: WeightRef) -> bool:
    if one.module != other.module:
        return False
    if one.attribute != other.attribute and not {one.attribute, other.attribute} <= {"weight", "bias"}:
        return False
    a, b = one.stacked_slice, other.stacked_slice
    if a and b and (one.attribute, a) != (other.attribute, b):
        return False
    return not (one.rows and other.rows) or one.rows.overlaps(other.rows)


def changed_entries(
    site_edit: SiteEdit, target: FoldTarget, parameters: Parameters
) -> Iterator[RowRange | EntryChoice]:
    """The entries that differ after the fold. Shapes: w (out, in), b (out)."""
    if target.side != "weight":
        yield from _changed_by_value(site_edit, target, parameters)
    for assign in site_edit.assigns:
        state = site_edit.site.states[assign.state]
        if assign.state not in ("w", "b") or state.weight is None:
            continue
        ranges = list(parameters.row_ranges(state.weight, state.shape))
        selectors = _added_selectors(assign.value, assign.state)
        if selectors is None:
            yield from ranges
            continue
        for instance in selectors:
            # Sites with common parameters select entries together, from all their parameters.
            together = instance.owner is not None and instance.form.common(instance.args) is not None
            key = (str(instance.owner),) if together else (site_edit.edit, site_edit.site.path, instance.key)
            count = instance.form.changed_entries(instance.args, instance.dims)
            assert count is not None
            yield from (EntryChoice(key, count, rows) for rows in ranges)


def _changed_by_value(site_edit: SiteEdit, target: FoldTarget, parameters: Parameters) -> Iterator[RowRange]:
    weight, bias = target.weight, target.bias
    value = affine_structure(site_edit, linear_states(target, site_edit.site))
    shape = target.site.states["w"].shape
    assert isinstance(shape, Weight)
    if weight and is_table(target.site):  # a constant is added to each row
        yield from parameters.row_ranges(weight, shape)
        return
    if weight and (value.matrix != "identity" or value.input):
        yield from parameters.row_ranges(weight, shape)
    bias_is_mapped = target.side == "output" and value.matrix != "identity" and bias is not None
    if value.constant or bias_is_mapped:
        rows = weight.rows if weight and weight.rows else Slice(0, shape.d_out)
        name = parameters.canonical(bias) if bias else f"{target.site.module}.bias"
        yield from (RowRange(name, start, stop) for start, stop in rows.blocks())


def _added_selectors(term: Term, state: str) -> list[FormInstance] | None:
    """In `state + f + g`, the forms that select where f and g are nonzero; None for other terms."""
    match term:
        case Arithmetic(op="+", left=left, right=right):
            reads = (isinstance(part, Read) and part.state == state for part in subterms(left))
            own, other = (left, right) if any(reads) else (right, left)
            return _join(_added_selectors(own, state), _selectors(other))
        case Arithmetic(op="-", left=left, right=right):
            return _join(_added_selectors(left, state), _selectors(right))
        case _:
            return [] if isinstance(term, Read) and term.state == state else None


def _selectors(term: Term) -> list[FormInstance] | None:
    """The forms that select where a term is not zero; None if it may be nonzero anywhere."""
    match term:
        case FormCall(instance=instance):
            return [instance] if instance.form.changed_entries(instance.args, instance.dims) is not None else None
        case Arithmetic(op="*", left=left, right=right):
            first = _selectors(left)
            return _selectors(right) if first is None else first
        case Arithmetic(op="/", left=left):
            return _selectors(left)
        case Arithmetic(left=left, right=right):
            return _join(_selectors(left), _selectors(right))
        case _:
            return None


def _join(first: list[FormInstance] | None, second: list[FormInstance] | None) -> list[FormInstance] | None:
    return None if first is None or second is None else [*first, *second]


def rank(site_edit: SiteEdit) -> int | None:
    """The rank of what is added to the weight; None if it may have any rank."""
    return _sum([_rank(assign.value, assign.state) for assign in site_edit.assigns])


def _rank(term: Term, state: str) -> int | None:
    match term:
        case Arithmetic(op="-", right=Read()):
            return None
        case Arithmetic(op="+" | "-", left=left, right=right):
            return _sum([_rank(left, state), _rank(right, state)])
        case _:
            return 0 if isinstance(term, Read) and term.state == state else _added_rank(term)


def _added_rank(term: Term) -> int | None:
    match term:
        case FormCall(instance=instance):
            return instance.form.rank(instance.args, instance.dims)
        case Arithmetic(op="*", left=left, right=right):
            return _added_rank(right) if is_number(left) else _added_rank(left) if is_number(right) else None
        case Arithmetic(op="/", left=left, right=right):
            return _added_rank(left) if is_number(right) else None
        case _:
            return None


def is_number(term: Term) -> bool:
    """Whether a term is one number, the same for all tasks."""
    return isinstance(term, Constant) or (
        isinstance(term, FormCall) and term.instance.form.name == "scalar" and not term.instance.tasks
    )


def _sum(ranks: list[int | None]) -> int | None:
    known = [rank for rank in ranks if rank is not None]
    return sum(known) if len(known) == len(ranks) else None
