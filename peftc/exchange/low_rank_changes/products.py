"""The changes of Linears that edits make, as products of thin matrices: W' = W + Σ f B A.

The equations are evaluated as functions of what the Linear reads and of what it gives. Where an
edit leaves h itself alone and adds products, these are its parameters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from peftc.addressing.sites import WeightRef
from peftc.equation_code.module import EquationModule
from peftc.exchange.low_rank_changes.factored import Factored, form_value, matrix_value
from peftc.folding.module_folds import Interpreter, Value, eval_mode
from peftc.folding.unrounded_parameters import Fold
from peftc.forms.module import FormModule
from peftc.forms.shapes import Weight
from peftc.planning.foldability.affine import NotAffine, is_linear, is_table, show_term
from peftc.planning.ir import FormCall, SiteEdit, Term
from peftc.rewriting.node_builder import row_arguments
from peftc.runtime.parameters import blocks_of


class Weights(Protocol):
    """The weights of a base."""

    def weight(self, ref: WeightRef) -> Tensor:
        """The rows of a site, in float64."""
        ...

    def height(self, ref: WeightRef) -> int:
        """How many rows the whole parameter has."""
        ...


@dataclass(frozen=True, eq=False)
class Product:
    """f B A, one term of a change. Shapes: B (out, k), A (k, in). `computed`: with the weight."""

    factor: float
    b: Tensor
    a: Tensor
    computed: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class LowRankInterpreter(Interpreter):
    """Values of terms as `Factored`. `matrix`: what a matrix, or a form without an input, is a
    function of, in equations of weights.
    """

    matrix: Factored | None = None

    def _value(self, term: Term) -> Value:
        if not isinstance(term, FormCall):
            return super()._value(term)
        instance, source = term.instance, None if term.input is None else self.value(term.input)
        if self.matrix is not None:
            if source is not None:
                raise NotAffine(f"`{show_term(term)}` is not the sum of the weight and a thin product", term)
            module = self.modules[instance.key]
            value = matrix_value(module, self.matrix)
            if value is None and not isinstance(module, EquationModule):  # such as `sparse`: a whole matrix
                raise NotAffine(f"`{show_term(term)}` has the full rank of the weight", term)
            return super()._value(term) if value is None else value
        if not isinstance(source, Factored):
            return super()._value(term)
        if (reason := instance.form.not_affine(instance.args, instance.dims)) is not None:
            raise NotAffine(f"`{show_term(term)}`: {reason}", term)
        return form_value(self.modules[instance.key], source)


def products(folds: Iterable[Fold], weights: Weights) -> list[Product]:
    """The change that edits of one weight make together. Shapes: of the whole parameter (out, in).

    Raises: NotAffine, with the term, for a change that is no sum of thin products.
    """
    terms = list[Product]()
    folds = list(folds)
    for fold in folds:
        own = list(_of_fold(fold, weights))
        if len(folds) > 1 and any(term.computed for term in own):
            term = fold.site_edit.assigns[-1].value
            raise NotAffine(f"`{show_term(term)}` acts on what another edit of this Linear has changed", term)
        terms += own
    if not terms and folds:
        last = folds[-1].site_edit.assigns[-1].value
        raise NotAffine(f"`{show_term(last)}` leaves the weight as it is, and a LoRA has a rank of 1 at least", last)
    return terms


def _of_fold(fold: Fold, weights: Weights) -> Iterable[Product]:
    site_edit, target = fold.site_edit, fold.target
    last = site_edit.assigns[-1].value
    is_expert = target.weight is not None and target.weight.stacked_slice is not None
    if target.weight is None or (target.side != "weight" if is_expert else target.site.bare):
        raise NotAffine(f"`{target.site.module}` is no Linear of its own", last)
    if target.site.calls != 1 and target.side != "weight" and not site_edit.site.is_of_every_call:
        raise NotAffine(f"`{target.site.module}` is called {target.site.calls} times, and this is one call", last)
    shape = target.site.states["w"].shape
    assert isinstance(shape, Weight)
    table = is_table(target.site)
    with torch.no_grad(), eval_mode(fold.modules.values()):
        if target.side == "weight":
            change = _weight_change(site_edit, fold.modules, shape)
        elif target.side == "input":
            change = _input_change(site_edit, fold.modules, shape.d_in)
        else:
            sizes = (shape.d_in, shape.d_out) if table else (shape.d_out, shape.d_in)
            change = _output_change(site_edit, fold.modules, *sizes)
    for side, value in change.items():
        for factor, (left, right) in zip(value.factors, value.products, strict=True):
            if right is None or left.shape[1] >= min(shape.d_out, shape.d_in):
                raise NotAffine(f"`{show_term(last)}` has the full rank of the weight", last)
            if left.shape[1] == 0:
                continue
            b, a, computed = left, right, side != "x"
            if side == "h":  # f L R (W x)
                if target.side == "output" and target.bias is not None and bool(weights.weight(target.bias).any()):
                    raise NotAffine(f"`{show_term(last)}` changes the bias too, of which it is a function", last)
                a = right @ weights.weight(target.weight)
            elif side == "z":  # W (f L R x)
                b = weights.weight(target.weight) @ left
            elif table and target.side == "weight":  # h = wᵀ x
                b, a = right.t(), left.t()
            yield Product(factor, b if table else spread(b, target.weight, weights), a, computed)


def spread(b: Tensor, ref: WeightRef, weights: Weights) -> Tensor:
    """The rows of a site among those of the whole parameter; zeros elsewhere."""
    if ref.rows is None:
        return b
    whole = weights.height(ref)
    result = b.new_zeros(whole, b.shape[1])
    blocks = rows_of_site(result, ref)
    blocks.copy_(b.unflatten(0, tuple(blocks.shape[:2])))
    return result


def rows_of_site(matrix: Tensor, ref: WeightRef) -> Tensor:
    """A view of the rows of a site: (blocks, rows of a block, in)."""
    if ref.rows is None or ref.rows.count == 1:
        return (matrix if ref.rows is None else matrix[ref.rows.start : ref.rows.stop]).unsqueeze(0)
    return blocks_of(matrix, 0, *row_arguments(ref.rows, matrix.shape[0]))


def _output_change(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], d_out: int, d_in: int
) -> dict[str, Factored]:
    """h' − h as a function of h, and of x."""
    own, inputs = is_linear(site_edit.site), Factored.one(d_in)
    of_h = _run(
        site_edit, modules, {"h": Factored.one(d_out)} | ({"x": Factored.zero(d_in, d_out)} if own else {}), ("h",)
    )
    of_x = _run(site_edit, modules, {"h": Factored.zero(d_out, d_in)} | ({"x": inputs} if own else {}), ("h",))
    _check_constant(site_edit, of_h)
    if of_x.diagonal is not None:
        term = site_edit.assigns[-1].value
        raise NotAffine(f"`{show_term(term)}` has the full rank of the weight", term)
    return {"h": _without_one(site_edit, of_h), "x": of_x}


def _input_change(site_edit: SiteEdit, modules: Mapping[str, FormModule], d: int) -> dict[str, Factored]:
    """z' − z as a function of z, which the Linear reads."""
    value = _run(site_edit, modules, {"h": Factored.one(d), "z": Factored.one(d)}, ("h", "z"))
    _check_constant(site_edit, value)
    return {"z": _without_one(site_edit, value)}


def _weight_change(site_edit: SiteEdit, modules: Mapping[str, FormModule], shape: Weight) -> dict[str, Factored]:
    """W' − W. A matrix is the function of what it multiplies."""
    if any(assign.state == "b" for assign in site_edit.assigns):
        raise NotAffine("it changes the bias", site_edit.assigns[-1].value)
    zero = Factored.zero(shape.d_out, shape.d_in)
    of_x = _run(site_edit, modules, {"w": zero}, ("w",), Factored.one(shape.d_in))
    of_w = _run(site_edit, modules, {"w": Factored.one(shape.d_out)}, ("w",), Factored.zero(shape.d_in, shape.d_out))
    _check_constant(site_edit, of_x)
    return {"h": _without_one(site_edit, of_w), "x": of_x}


def _run(
    site_edit: SiteEdit,
    modules: Mapping[str, FormModule],
    states: dict[str, Factored],
    written: tuple[str, ...],
    matrix: Factored | None = None,
) -> Factored:
    like = torch.empty((1, 1, 1), dtype=torch.float64)
    interpreter = LowRankInterpreter(modules, like, cast(dict[str, Value], dict(states)))
    interpreter.matrix = matrix
    interpreter.run(site_edit, written)
    state = next(assign.state for assign in reversed(site_edit.assigns) if assign.state in written)
    value = interpreter.states[state]
    if not isinstance(value, Factored):
        term = site_edit.assigns[-1].value
        raise NotAffine(f"`{show_term(term)}` no longer depends on the input", term)
    return value


def _check_constant(site_edit: SiteEdit, value: Factored) -> None:
    if value.bias is not None and bool(value.bias.any()):
        term = site_edit.assigns[-1].value
        raise NotAffine(f"`{show_term(term)}` adds a constant, and a product of matrices has none", term)


def _without_one(site_edit: SiteEdit, value: Factored) -> Factored:
    """value − identity, if there is just one identity in it."""
    if value.diagonal is None or not bool((value.diagonal == 1).all()):
        term = site_edit.assigns[-1].value
        raise NotAffine(f"`{show_term(term)}` changes the whole weight, not by a product of low rank", term)
    return replace(value, diagonal=None)
