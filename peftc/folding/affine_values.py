"""Folding the equations of one edit into a weight and a bias: an abstract interpretation over affine values.

Computed in float32 (float64 where the weight is float64) and rounded once. Whether an edit folds at all, and into what,
is `peftc.planning.foldability.affine`; this module does the arithmetic for edits that do.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peftc.concurrency.interrupts import shielded
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule, has_values
from peftc.planning.foldability.affine import NotAffine, show_term
from peftc.planning.foldability.target import Side, is_linear
from peftc.planning.ir import Arithmetic, Concat, Constant, FormCall, FrozenCall, Read, SiteEdit, Term

Value = Affine | Tensor  # a Tensor is constant: a number, a vector (d_out,), or a weight in equations of w


@dataclass(frozen=True, eq=False)
class FoldedWeights:
    """The parameters after folding, in the dtype they had; `bias` may be new.

    `survived` is the part of the entries with a change that still differ after rounding to that dtype (1.0 where all do).
    """

    weight: Tensor
    bias: Tensor | None
    survived: float


@dataclass(frozen=True)
class Refusal:
    """Why nothing was folded."""

    reason: str


def fold_terms(
    placed: SiteEdit,
    modules: Mapping[str, FormModule],
    weight: Tensor,
    bias: Tensor | None,
    side: Side | None = None,
) -> FoldedWeights | Refusal:
    """W' and b' such that the Linear alone computes what the edit at it computed.

    Equations of w and b come first, as they do when the model runs; then those of h (or z).

    Shapes: weight (out, in), as `nn.Linear` has it, or (d,) of a norm; bias (out,).
    Args: `modules`: by `Instance.key`; `side`: that of `fold_target` ("input": the edit changes what the Linear reads).
    """
    folded = folded_terms(placed, modules, weight, bias, side or side_of(placed))
    return folded if isinstance(folded, Refusal) else _rounded(weight, bias, *folded)


def folded_terms(
    placed: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor, Tensor | None] | Refusal:
    """As `fold_terms`, before rounding: W' and b' in float32 (float64)."""
    refused = _unready([weight, *([] if bias is None else [bias]), *_parameters(modules)])
    if refused is not None:
        return refused
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    try:
        with torch.no_grad(), evaluating(modules.values()):
            w, b = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
            return _fold(placed, modules, w, b, side)
    except NotAffine as found:
        return Refusal(found.reason)


@shielded
def evaluating(modules: Iterable[FormModule]) -> Generator[None]:
    """Forms as they are when nothing is trained."""
    inner = [one for module in modules for one in module.modules()]
    flags = [one.training for one in inner]
    for one in inner:
        one.training = False
    try:
        yield
    finally:
        for one, flag in zip(inner, flags, strict=True):
            one.training = flag


def side_of(placed: SiteEdit) -> Side:
    """The side that the edit's equations ask for (see `FoldTarget`)."""
    states = {assign.state for assign in placed.assigns}
    if states <= {"w", "b"}:
        return "weight"
    return "input" if states == {"z"} or placed.site.steps[-1][0] == "hidden" else "output"


@dataclass
class Interpreter:
    """Values of terms; `states` are the present values, and a term seen before keeps the value it had."""

    modules: Mapping[str, FormModule]
    like: Tensor  # gives forms without an input the dtype and the device
    states: dict[str, Value]
    known: dict[int, Value] = field(default_factory=dict[int, Value])

    def run(self, placed: SiteEdit, wanted: Collection[str]) -> None:
        """The equations of the states in `wanted`, in order; what `let` binds is computed where it stands."""
        for i, assign in enumerate(placed.assigns):
            for _, term in (let for let in placed.lets if let[0] == i):
                if reads(term) <= self.states.keys():
                    self.value(term)
            if assign.state in wanted:
                self.states[assign.state] = self.value(assign.value)

    def value(self, term: Term) -> Value:
        if id(term) not in self.known:
            self.known[id(term)] = self._value(term)
        return self.known[id(term)]

    def _value(self, term: Term) -> Value:
        match term:
            case Constant(value=number):
                return self.like.new_tensor(number)
            case Read(state=state):
                if state in self.states:
                    return self.states[state]
                raise NotAffine(f"`{state}` is not what the Linear reads", term)
            case FormCall():
                return self._applied(term)
            case Arithmetic(left=left, right=right):
                return arithmetic(term, self.value(left), self.value(right))
            case _:
                raise NotAffine(f"`{show_term(term)}` is not affine", term)

    def _applied(self, term: FormCall) -> Value:
        module = self.modules[term.instance.key]
        value = self.like if term.input is None else self.value(term.input)
        if isinstance(value, Tensor):
            return module(value)
        reason = term.instance.form.affine(term.instance.args)
        if reason is not None:
            raise NotAffine(f"`{show_term(term)}`: {reason}", term)
        return module.fold(value)


def reads(term: Term) -> set[str]:
    """The states that a term reads."""
    match term:
        case Read(state=state):
            return {state}
        case Constant() | FormCall(input=None):
            return set()
        case FormCall(input=value):
            assert value is not None
            return reads(value)
        case FrozenCall(input=value):
            return reads(value)
        case Arithmetic(left=left, right=right):
            return reads(left) | reads(right)
        case Concat(parts=parts):
            return {state for part in parts for state in reads(part)}


def arithmetic(term: Arithmetic, left: Value, right: Value) -> Value:
    """left op right, for affine values and constants."""
    match term.op, left, right:
        case "+", Affine(), Affine():
            return left.plus(right)
        case "-", Affine(), Affine():
            return left.plus(right.scaled(-1.0))
        case "+", Affine() as value, Tensor() as constant:
            return value.shifted(constant)
        case "+", Tensor() as constant, Affine() as value:
            return value.shifted(constant)
        case "-", Affine(), Tensor():
            return left.shifted(-right)
        case "-", Tensor(), Affine():
            return right.scaled(-1.0).shifted(left)
        case "*", Affine() as value, Tensor() as factor:
            return value.scaled(factor)
        case "*", Tensor() as factor, Affine() as value:
            return value.scaled(factor)
        case "/", Affine(), Tensor():
            return left.scaled(1.0 / right)
        case op, Tensor(), Tensor():
            return _CONSTANT[op](left, right)
        case _:
            raise NotAffine(f"`{show_term(term)}` is not affine in the input", term)


_CONSTANT = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}


def _fold(
    placed: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor, Tensor | None]:
    like = weight.new_empty((1, 1, 1))
    present: dict[str, Value] = {"w": weight}
    if bias is not None:
        present["b"] = bias
    weights = Interpreter(modules, like, present)
    weights.run(placed, ("w", "b"))
    weight, bias = _tensor(weights.states["w"]), _optional(weights.states.get("b"))
    if side == "weight":
        return weight, bias
    value = _hidden(placed, modules, like, _start(placed, weight, bias, side))
    if side == "input":
        value = value.through(weight, bias)
    return value.matrix(), value.bias


def _hidden(placed: SiteEdit, modules: Mapping[str, FormModule], like: Tensor, start: dict[str, Value]) -> Affine:
    """The value of h (or z) after its equations."""
    hidden = Interpreter(modules, like, start)
    hidden.run(placed, ("h", "z"))
    state = "h" if any(assign.state == "h" for assign in placed.assigns) else "z"
    value = hidden.states[state]
    if isinstance(value, Affine):
        return value
    raise NotAffine(f"`{state}` no longer depends on the input", placed.assigns[-1].value)


def _start(placed: SiteEdit, weight: Tensor, bias: Tensor | None, side: Side) -> dict[str, Value]:
    identity = Affine.identity(weight.shape[1], weight.dtype, weight.device)
    if side == "input":
        return {"h": identity, "z": identity}
    start: dict[str, Value] = {"h": Affine.linear(weight, bias)}
    return start | {"x": identity} if is_linear(placed.site) else start  # x of a sub-layer is not what its Linear reads


def _rounded(
    weight: Tensor, bias: Tensor | None, new_weight: Tensor, new_bias: Tensor | None
) -> FoldedWeights | Refusal:
    pairs = [(weight, new_weight)]
    if new_bias is not None:
        pairs.append((torch.zeros_like(new_bias, dtype=weight.dtype) if bias is None else bias, new_bias))
    rounded = [new.to(old.dtype) for old, new in pairs]
    if not all(bool(torch.isfinite(value).all()) for value in rounded):
        return Refusal(f"the folded weights have NaN or infinite entries in {str(weight.dtype).removeprefix('torch.')}")
    wanted = sum(int(torch.count_nonzero(new != old.to(new.dtype))) for old, new in pairs)
    kept = sum(int(torch.count_nonzero(value != old)) for value, (old, _) in zip(rounded, pairs, strict=True))
    return FoldedWeights(rounded[0], rounded[1] if len(rounded) > 1 else None, kept / wanted if wanted else 1.0)


def _unready(tensors: list[Tensor]) -> Refusal | None:
    if not all(map(has_values, tensors)):
        return Refusal("the weights are not loaded")
    if not all(tensor.is_floating_point() for tensor in tensors):
        return Refusal("the weight is quantised")
    return None


def _parameters(modules: Mapping[str, FormModule]) -> list[Tensor]:
    both = [one for module in modules.values() for one in (module, module.owner_module) if one is not None]
    return [t for module in both for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


def _tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _optional(value: Value | None) -> Tensor | None:
    return None if value is None else _tensor(value)
