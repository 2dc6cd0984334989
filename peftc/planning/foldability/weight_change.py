"""What a fold writes: which entries of the base change, and by a change of which rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from peftc.addressing.parameter_ranges import EntryChoice, Parameters, RowRange
from peftc.addressing.sites import Slice
from peftc.forms.shapes import Weight
from peftc.planning.foldability.affine import FoldTarget, linear_states
from peftc.planning.ir import Arithmetic, Constant, FormCall, FormInstance, Read, SiteEdit, Term, subterms

Own = Literal["absent", "one", "other"]


@dataclass(frozen=True)
class Parts:
    """An affine value A h + B x + c, as far as counting needs it: is A absent, one or something else; are B, c there."""

    own: Own = "absent"
    input: bool = False
    constant: bool = False

    def __add__(self, other: Parts) -> Parts:
        own: Own = other.own if self.own == "absent" else self.own if other.own == "absent" else "other"
        return Parts(own, self.input or other.input, self.constant or other.constant)

    def mapped(self, constant: bool = False) -> Parts:
        """After a linear map, which may add a constant of its own."""
        return Parts("absent" if self.own == "absent" else "other", self.input, self.constant or constant)

    @property
    def varies(self) -> bool:
        return self.own != "absent" or self.input


def changed(placed: SiteEdit, target: FoldTarget, parameters: Parameters) -> Iterable[RowRange | EntryChoice]:
    """The entries that differ after the fold. Shapes: w (out, in), b (out)."""
    site = target.site
    weight, bias = target.weight, target.bias
    if target.side == "weight":
        yield from _written_weights(placed, parameters)
        return
    parts = value_of(placed, linear_states(target, placed.site))
    shape = site.states["w"].shape
    assert isinstance(shape, Weight)
    if weight and (parts.own != "one" or parts.input):
        yield from parameters.regions(weight, shape)
    moved = target.side == "output" and parts.own != "one" and bias is not None
    if parts.constant or moved:
        rows = weight.rows if weight and weight.rows else Slice(0, shape.d_out)
        name = parameters.canonical(bias) if bias else f"{site.module}.bias"
        yield from parameters.rows(name, rows)
    yield from _written_weights(placed, parameters)


def _written_weights(placed: SiteEdit, parameters: Parameters) -> Iterable[RowRange | EntryChoice]:
    """All entries of what is written, or those that its equations choose."""
    for assign in placed.assigns:
        state = placed.site.states[assign.state]
        if assign.state not in ("w", "b") or state.weight is None:
            continue
        regions = list(parameters.regions(state.weight, state.shape))
        choices = _added_choices(assign.value, assign.state)
        if choices is None:
            yield from regions
            continue
        for one in choices:
            assert one.form.changes is not None
            count = one.form.changes(one.args, one.dims)
            yield from (EntryChoice(_choice(placed, one), count, region) for region in regions)


def _choice(placed: SiteEdit, one: FormInstance) -> tuple[str, ...]:
    """What tells one choice of entries from another: those who have their parameters in common need not choose together."""
    together = one.owner is not None and one.form.common(one.args) is not None
    return (str(one.owner),) if together else (placed.edit, placed.site.path, one.key)


def _added_choices(term: Term, state: str) -> list[FormInstance] | None:
    """Of `state + f + g` those that choose the entries at which they are not zero; None where it is no such sum."""
    match term:
        case Arithmetic(op="+", left=left, right=right):
            own, other = (left, right) if _reads(left, state) else (right, left)
            return _joined(_added_choices(own, state), _choices(other))
        case Arithmetic(op="-", left=left, right=right):
            return _joined(_added_choices(left, state), _choices(right))
        case _:
            return [] if isinstance(term, Read) and term.state == state else None


def _choices(term: Term) -> list[FormInstance] | None:
    """Those that choose the entries at which a term is not zero, None where it may be any."""
    match term:
        case FormCall(instance=instance):
            return [instance] if instance.form.changes is not None else None
        case Arithmetic(op="*", left=left, right=right):
            first = _choices(left)
            return _choices(right) if first is None else first
        case Arithmetic(op="/", left=left):
            return _choices(left)
        case Arithmetic(left=left, right=right):
            return _joined(_choices(left), _choices(right))
        case _:
            return None


def _joined(first: list[FormInstance] | None, second: list[FormInstance] | None) -> list[FormInstance] | None:
    return None if first is None or second is None else [*first, *second]


def _reads(term: Term, state: str) -> bool:
    return any(isinstance(part, Read) and part.state == state for part in subterms(term))


def value_of(placed: SiteEdit, linear: Collection[str]) -> Parts:
    """The hidden state after the equations of the edit, in terms of the one before."""
    env: dict[str, Parts] = {}
    kept: dict[int, Parts] = {}

    def parts(term: Term) -> Parts:
        if id(term) in kept:
            return kept[id(term)]
        match term:
            case Read(state=state):
                start = (
                    Parts("one")
                    if state in linear and state != "x"
                    else Parts(input=state == "x", constant=state == "b")
                )
                return env.get(state, start)
            case Arithmetic(op="+" | "-" as op, left=left, right=right):
                return parts(left) + (parts(right) if op == "+" else parts(right).mapped())
            case Arithmetic(left=left, right=right):
                return _scaled(left, right)
            case FormCall(instance=instance, input=value) if value is not None:
                return parts(value).mapped(bool(instance.args.get("bias")))
            case _:
                return Parts(constant=True)

    def _scaled(left: Term, right: Term) -> Parts:
        first, second = parts(left), parts(right)
        varying, factor = (first, right) if first.varies else (second, left)
        return varying if isinstance(factor, Constant) and factor.value == 1 else varying.mapped()

    last = Parts("one")
    for i, assign in enumerate(placed.assigns):
        for _, term in (let for let in placed.lets if let[0] == i):
            kept[id(term)] = parts(term)
        if assign.state not in ("w", "b"):
            last = env[assign.state] = parts(assign.value)
    return last


def rank(placed: SiteEdit) -> int | None:
    """The rank of what is added to the weight, None where the change may have any rank."""
    ranks = [_rank(assign.value, assign.state) for assign in placed.assigns]
    known = [found for found in ranks if found is not None]
    return sum(known) if len(known) == len(ranks) else None


def _rank(term: Term, state: str) -> int | None:
    match term:
        case Arithmetic(op="+" | "-" as op, left=left, right=right):
            parts = [_rank(left, state), _rank(right, state)]
            if op == "-" and isinstance(right, Read):
                return None
            return parts[0] + parts[1] if parts[0] is not None and parts[1] is not None else None
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
    """One number, which leaves a rank as it is."""
    return isinstance(term, Constant) or (isinstance(term, FormCall) and term.instance.form.name == "scalar")
