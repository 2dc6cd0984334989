"""What a fold writes: which entries of the base change, and the rank of the change."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.parameter_ranges import EntryChoice, Parameters, RowRange
from peftc.addressing.sites import Slice
from peftc.forms.shapes import Weight
from peftc.planning.foldability.target import FoldTarget, linear_states
from peftc.planning.ir import Arithmetic, Constant, FormCall, FormInstance, Read, SiteEdit, Term, subterms

Matrix = Literal["zero", "identity", "other"]


@dataclass(frozen=True)
class AffineStructure:
    """An affine value A h + B x + c for counting: the kind of A, and whether B and c exist."""

    matrix: Matrix = "zero"
    input: bool = False
    constant: bool = False

    def __add__(self, other: AffineStructure) -> AffineStructure:
        one, two = self.matrix, other.matrix
        matrix: Matrix = two if one == "zero" else one if two == "zero" else "other"
        return AffineStructure(matrix, self.input or other.input, self.constant or other.constant)

    def mapped(self, constant: bool = False) -> AffineStructure:
        """After a linear map, which may add a constant of its own."""
        matrix: Matrix = "zero" if self.matrix == "zero" else "other"
        return AffineStructure(matrix, self.input, self.constant or constant)

    @property
    def varies(self) -> bool:
        return self.matrix != "zero" or self.input


def changed_entries(
    site_edit: SiteEdit, target: FoldTarget, parameters: Parameters
) -> Iterator[RowRange | EntryChoice]:
    """The entries that differ after the fold. Shapes: w (out, in), b (out)."""
    if target.side != "weight":
        yield from _changed_by_value(site_edit, target, parameters)
    yield from _written_entries(site_edit, parameters)


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


def _written_entries(site_edit: SiteEdit, parameters: Parameters) -> Iterator[RowRange | EntryChoice]:
    """All entries of the written parameters, or those that the forms select."""
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


def affine_structure(site_edit: SiteEdit, linear: Collection[str]) -> AffineStructure:
    """The hidden state after the equations of the edit, as a function of the state before."""
    env: dict[str, AffineStructure] = {}
    lets: dict[int, AffineStructure] = {}

    def structure(term: Term) -> AffineStructure:
        if id(term) in lets:
            return lets[id(term)]
        match term:
            case Read(state=state) if state in env:
                return env[state]
            case Read(state=state) if state in linear and state != "x":
                return AffineStructure("identity")
            case Read(state=state):
                return AffineStructure(input=state == "x", constant=state == "b")
            case Arithmetic(op="+", left=left, right=right):
                return structure(left) + structure(right)
            case Arithmetic(op="-", left=left, right=right):
                return structure(left) + structure(right).mapped()
            case Arithmetic(left=left, right=right):
                first, second = structure(left), structure(right)
                value, factor = (first, right) if first.varies else (second, left)
                return value if isinstance(factor, Constant) and factor.value == 1 else value.mapped()
            case FormCall(instance=instance, input=value) if value is not None:
                return structure(value).mapped(bool(instance.args.get("bias")))
            case _:
                return AffineStructure(constant=True)

    value = AffineStructure("identity")
    for i, assign in enumerate(site_edit.assigns):
        for _, term in (let for let in site_edit.lets if let[0] == i):
            lets[id(term)] = structure(term)
        if assign.state not in ("w", "b"):
            value = env[assign.state] = structure(assign.value)
    return value


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
            return _added_rank(right) if _is_factor(left) else _added_rank(left) if _is_factor(right) else None
        case Arithmetic(op="/", left=left, right=right):
            return _added_rank(left) if _is_factor(right) else None
        case _:
            return None


def _is_factor(term: Term) -> bool:
    """Whether a term is one number, which does not change a rank."""
    return isinstance(term, Constant) or (isinstance(term, FormCall) and term.instance.form.name == "scalar")


def _sum(ranks: list[int | None]) -> int | None:
    known = [rank for rank in ranks if rank is not None]
    return sum(known) if len(known) == len(ranks) else None
