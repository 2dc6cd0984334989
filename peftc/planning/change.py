"""What a fold writes: which entries of the base change, and by a change of which rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from peftc.forms.shapes import Weight
from peftc.planning.affine import FoldTarget, linear_states
from peftc.planning.ir import Applied, Arithmetic, Constant, Placed, Read, Term
from peftc.planning.regions import Parameters, Region
from peftc.tracing.sites import Slice

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


def changed(placed: Placed, target: FoldTarget, parameters: Parameters) -> Iterable[Region]:
    """The entries that differ after the fold. Shapes: w (out, in), b (out)."""
    site = target.site
    weight, bias = target.weight, target.bias
    if target.side == "weight":
        for name in {assign.state for assign in placed.assigns}:
            state = placed.site.states[name]
            if state.weight:
                yield from parameters.regions(state.weight, state.shape)
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


def _written_weights(placed: Placed, parameters: Parameters) -> Iterable[Region]:
    for name in {assign.state for assign in placed.assigns} & {"w", "b"}:
        state = placed.site.states[name]
        if state.weight:
            yield from parameters.regions(state.weight, state.shape)


def value_of(placed: Placed, linear: Collection[str]) -> Parts:
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
            case Applied(instance=instance, input=value) if value is not None:
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


def rank(placed: Placed) -> int | None:
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
        case Applied(instance=instance):
            return instance.form.rank(instance.args, instance.dims)
        case Arithmetic(op="*", left=left, right=right):
            return _added_rank(right) if _is_factor(left) else _added_rank(left) if _is_factor(right) else None
        case Arithmetic(op="/", left=left, right=right):
            return _added_rank(left) if _is_factor(right) else None
        case _:
            return None


def _is_factor(term: Term) -> bool:
    """One number, which leaves a rank as it is."""
    return isinstance(term, Constant) or (isinstance(term, Applied) and term.instance.form.name == "scalar")
