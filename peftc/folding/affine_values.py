"""Folds the equations of one edit into a weight and a bias: an interpreter over affine values.

Whether an edit folds, and into what, is decided by `peftc.planning.foldability.affine`.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from peftc.concurrency.interrupts import shielded
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule, has_values
from peftc.planning.arithmetic import ARITHMETIC
from peftc.planning.foldability.affine import NotAffine, show_term
from peftc.planning.foldability.target import Side, is_linear
from peftc.planning.ir import Arithmetic, Constant, FormCall, Read, SiteEdit, Term, subterms

Value = Affine | Tensor  # a Tensor is constant: a number, a vector (d_out,), or a weight in equations of w


@dataclass(frozen=True)
class Refusal:
    """Why nothing was folded."""

    reason: str


def fold_terms(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor, Tensor | None] | Refusal:
    """W' and b' in float32 (float64), such that the Linear alone computes what the edit at it
    computed.

    Equations of w and b come first, as they do when the model runs; then those of h (or z).
    Shapes: weight (out, in), as `nn.Linear` has it, or (d,) of a norm; bias (out,).
    Args: `modules`: by `FormInstance.key`. `side`: that of `fold_target` ("input": the edit changes
    what the Linear reads).
    """
    own = [weight] if bias is None else [weight, bias]
    forms = [one for module in modules.values() for one in (module, module.owner_module) if one is not None]
    trained = [t for form in forms for t in (*form.parameters(), *form.buffers()) if t.is_floating_point()]
    if not all(map(has_values, (*own, *trained))):
        return Refusal("the weights are not loaded")
    if not all(tensor.is_floating_point() for tensor in own):
        return Refusal("the weight is quantised")
    dtype = sum_dtype(weight.dtype)
    try:
        with torch.no_grad(), eval_mode(modules.values()):
            w, b = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
            return _fold(site_edit, modules, w, b, side)
    except NotAffine as error:
        return Refusal(error.reason)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@shielded
def eval_mode(modules: Iterable[FormModule]) -> Generator[None]:
    inner = [one for module in modules for one in module.modules()]
    flags = [one.training for one in inner]
    for one in inner:
        one.training = False
    try:
        yield
    finally:
        for one, flag in zip(inner, flags, strict=True):
            one.training = flag


@dataclass
class Interpreter:
    """Values of terms. `states` are the present values; a term keeps the value of its first
    evaluation.
    """

    modules: Mapping[str, FormModule]
    like: Tensor  # the dtype and the device for forms without an input
    states: dict[str, Value]
    known: dict[int, Value] = field(default_factory=dict[int, Value])

    def run(self, site_edit: SiteEdit, states: Collection[str]) -> None:
        """The equations of some states, in order; what `let` binds is computed where it stands."""
        for i, assign in enumerate(site_edit.assigns):
            for _, term in (let for let in site_edit.lets if let[0] == i):
                if reads(term) <= self.states.keys():
                    self.value(term)
            if assign.state in states:
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
            case FormCall(instance=instance, input=source):
                value = self.like if source is None else self.value(source)
                if isinstance(value, Affine) and (reason := instance.form.affine(instance.args)) is not None:
                    raise NotAffine(f"`{show_term(term)}`: {reason}", term)
                module = self.modules[instance.key]
                return module.fold(value) if isinstance(value, Affine) else module(value)
            case Arithmetic(left=left, right=right):
                return arithmetic(term, self.value(left), self.value(right))
            case _:
                raise NotAffine(f"`{show_term(term)}` is not affine", term)


def reads(term: Term) -> set[str]:
    return {part.state for part in subterms(term) if isinstance(part, Read)}


def arithmetic(term: Arithmetic, left: Value, right: Value) -> Value:
    """left op right, for affine values and constants."""
    match term.op, left, right:
        case "+" | "-", Affine(), Affine():
            return left.plus(right if term.op == "+" else right.scaled(-1.0))
        case "+" | "-", Affine(), Tensor():
            return left.shifted(right if term.op == "+" else -right)
        case "+" | "-", Tensor(), Affine():
            return (right if term.op == "+" else right.scaled(-1.0)).shifted(left)
        case ("*", Affine() as value, Tensor() as factor) | ("*", Tensor() as factor, Affine() as value):
            return value.scaled(factor)
        case "/", Affine(), Tensor():
            return left.scaled(1.0 / right)
        case op, Tensor(), Tensor():
            return ARITHMETIC[op](left, right)
        case _:
            raise NotAffine(f"`{show_term(term)}` is not affine in the input", term)


def _fold(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor, Tensor | None]:
    like = weight.new_empty((1, 1, 1))
    weights = Interpreter(modules, like, {"w": weight} if bias is None else {"w": weight, "b": bias})
    weights.run(site_edit, ("w", "b"))
    weight, bias = cast(Tensor, weights.states["w"]), cast(Tensor | None, weights.states.get("b"))
    if side == "weight":
        return weight, bias
    states: dict[str, Value] = {"x": Affine.identity(weight.shape[1], weight.dtype, weight.device)}
    if side == "input":
        states = {"h": states["x"], "z": states["x"]}
    else:  # a sub-layer's x is not its Linear's
        states = {"h": Affine.linear(weight, bias)} | (states if is_linear(site_edit.site) else {})
    hidden = Interpreter(modules, like, states)
    hidden.run(site_edit, ("h", "z"))
    state = "h" if any(assign.state == "h" for assign in site_edit.assigns) else "z"
    value = hidden.states[state]
    if not isinstance(value, Affine):
        raise NotAffine(f"`{state}` no longer depends on the input", site_edit.assigns[-1].value)
    value = value.through(weight, bias) if side == "input" else value
    return value.matrix(), value.bias
