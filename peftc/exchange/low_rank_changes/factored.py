"""Affine functions that keep the numbers in front of their products apart from the matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peftc.equation_code.code import evaluate
from peftc.equation_code.fold import Fold
from peftc.equation_code.module import EquationModule
from peftc.equations.analysis import Place
from peftc.equations.values import Value
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule
from peftc.syntax import ast


@dataclass(frozen=True, eq=False)
class Factored(Affine):
    """v ↦ diagonal ⊙ v + Σ f L (R v) + bias

    So L and R of `4 * lora(x)` are its parameters, bit for bit, and f is 4 α / r.
    Shapes: as `Affine`; a number f for each product.
    """

    factors: tuple[float, ...] = ()

    @staticmethod
    def zero(d_out: int, d_in: int) -> Factored:
        left, right = (torch.zeros(size, dtype=torch.float64) for size in ((d_out, 0), (0, d_in)))
        return Factored(products=((left, right),), factors=(1.0,))

    @staticmethod
    def one(d: int) -> Factored:
        return Factored(diagonal=torch.ones(d, dtype=torch.float64))

    def through(self, weight: Tensor, bias: Tensor | None = None) -> Factored:
        moved = super().through(weight, bias)
        factors = self.factors if self.diagonal is None else (*self.factors, 1.0)
        return Factored(moved.diagonal, moved.products, moved.bias, factors)

    def scaled(self, factor: Tensor | float) -> Factored:
        if isinstance(factor, Tensor) and factor.numel() > 1:
            vector = factor.reshape(-1)
            scaled = super().scaled(vector)
            return Factored(scaled.diagonal, scaled.products, scaled.bias, self.factors)
        number = float(factor)
        return Factored(
            None if self.diagonal is None else self.diagonal * number,
            self.products,
            None if self.bias is None else self.bias * number,
            tuple(one * number for one in self.factors),
        )

    def plus(self, other: Affine) -> Factored:
        second = factored(other)
        total = super().plus(second)
        return Factored(total.diagonal, total.products, total.bias, self.factors + second.factors)

    def shifted(self, by: Tensor | float) -> Factored:
        moved = super().shifted(by)
        return replace(self, bias=moved.bias)

    def matrix(self) -> Tensor:
        scaled = ((left * f, right) for f, (left, right) in zip(self.factors, self.products, strict=True))
        return Affine(self.diagonal, tuple(scaled), self.bias).matrix()


def factored(value: Affine) -> Factored:
    """Any affine function; a number of 1 for each product."""
    if isinstance(value, Factored):
        return value
    products = value.all_products()
    return Factored(value.diagonal, products, value.bias, (1.0,) * len(products))


def form_value(module: FormModule, value: Factored) -> Factored:
    """A form of an affine value, with the products of its text in their cheapest order."""
    if not isinstance(module, EquationModule):
        return factored(module.fold(value))
    factor, node = module.place.product
    result = _fold(module, value).value(node)
    assert isinstance(result, Affine)
    return factored(result).scaled(factor)


def matrix_value(module: FormModule, value: Factored) -> Affine | None:
    """The matrix that a form gives, times an affine value: B (A v) for a product B A. None for a
    form that gives no matrix.
    """
    if not isinstance(module, EquationModule):
        return None
    place = module.place
    assert place.result is not None
    operand = place.operand(place.result)
    if not isinstance(operand, Value) or len(operand.type.size) != 2 or operand.type.batch:
        return None
    fold = _fold(module, value)
    factor, node = place.product
    return _times(place, node, value, fold).scaled(factor)


def _times(place: Place, node: ast.Expr, value: Affine, fold: Fold) -> Affine:
    """A matrix times an affine value, factor by factor."""
    match node:
        case ast.Name(name) if name in place.lets:
            return _times(place, place.lets[name], value, fold)
        case ast.Binary("@", left, right):
            return _times(place, left, _times(place, right, value, fold), fold)
        case ast.Binary("+" | "-" as op, left, right):
            second = _times(place, right, value, fold)
            return _times(place, left, value, fold).plus(second if op == "+" else second.scaled(-1.0))
        case ast.Binary("*", left, right) if not isinstance(place.operand(left), Value):
            return _times(place, right, value, fold).scaled(float(place.operand(left)))  # pyright: ignore[reportArgumentType]
        case ast.Binary("*" | "/" as op, left, right) if not isinstance(place.operand(right), Value):
            number = float(place.operand(right))  # pyright: ignore[reportArgumentType]
            return _times(place, left, value, fold).scaled(number if op == "*" else 1 / number)
        case _:
            return value.through(fold.constant(node).to(value.dtype))


def _fold(module: EquationModule, value: Affine) -> Fold:
    place = module.place
    own = {name: tensor.detach() for name, tensor in module.tensors().items()}
    tensors = {name: one.to(value.dtype) if one.is_floating_point() else one for name, one in own.items()}
    return Fold(place, value, lambda node: evaluate(place, node, {}, tensors))
