"""What a fold writes: which entries of the base change, and the rank of the change."""

from __future__ import annotations

from collections.abc import Iterator

from peftc.addressing.parameter_ranges import EntryChoice, Parameters, RowRange
from peftc.addressing.sites import Slice
from peftc.forms.shapes import Weight
from peftc.planning.foldability.affine import affine_structure
from peftc.planning.foldability.target import FoldTarget, linear_states
from peftc.planning.ir import Arithmetic, Constant, FormCall, FormInstance, Read, SiteEdit, Term, subterms


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
            assert instance.form.changes is not None
            # Sites with common parameters select entries together, from all their parameters.
            together = instance.owner is not None and instance.form.common(instance.args) is not None
            key = (str(instance.owner),) if together else (site_edit.edit, site_edit.site.path, instance.key)
            count = instance.form.changes(instance.args, instance.dims)
            yield from (EntryChoice(key, count, rows) for rows in ranges)


def _changed_by_value(site_edit: SiteEdit, target: FoldTarget, parameters: Parameters) -> Iterator[RowRange]:
    weight, bias = target.weight, target.bias
    value = affine_structure(site_edit, linear_states(target, site_edit.site))
    shape = target.site.states["w"].shape
    assert isinstance(shape, Weight)
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
            return [instance] if instance.form.changes is not None else None
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
