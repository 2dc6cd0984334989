"""The equation of a form over affine values: what it adds to a weight and a bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from peftc.equations.analysis import Place
from peftc.equations.values import Value
from peftc.forms.affine_module import Affine
from peftc.syntax import ast

Folded = Affine | Tensor | float


class Fold:
    """Evaluates an equation in which the input is an affine function.

    Args: `constant`: the tensor of a part that does not depend on the input.
    """

    def __init__(self, place: Place, value: Affine, constant: Callable[[ast.Expr], Tensor]) -> None:
        self.place, self.input, self.constant = place, value, constant
        self.values: dict[int, Folded] = {}

    def value(self, node: ast.Expr) -> Folded:
        if id(node) not in self.values:
            self.values[id(node)] = self._value(node)
        return self.values[id(node)]

    def _value(self, node: ast.Expr) -> Folded:
        operand = self.place.operand(node)
        if not isinstance(operand, Value):
            assert not isinstance(operand, str)
            return float(operand)
        if not operand.varies:
            return self.constant(node).to(self.input.dtype)
        match node:
            case ast.Name(name):
                return self.input if name in self.place.inputs else self.value(self.place.lets[name])
            case ast.Negative(value):
                return self._affine(value).scaled(-1.0)
            case ast.Item(value, (index,)):
                owner = self._affine(value)
                return owner.through(_identity(owner.d_out, owner)[int(self.place.number(index))][None])
            case ast.Call(function, args):
                return self._call(self.place.function(function), args)
            case ast.Binary(op, left, right):
                return self._binary(op, left, right)
            case _:
                raise TypeError(f"{type(node).__name__} is not affine")  # the planner's verdict comes first

    def _affine(self, node: ast.Expr) -> Affine:
        value = self.value(node)
        assert isinstance(value, Affine)
        return value

    def _call(self, function: str, args: tuple[ast.Expr, ...]) -> Affine:
        if function == "concat":
            return self._joined(list(map(self._affine, args)))
        value = self._affine(args[0])
        if function == "narrow":
            start, count = (int(self.place.number(arg)) for arg in args[1:])
            return value.through(_identity(value.d_out, value)[start : start + count])
        if function == "mean":
            d = value.d_out
            return value.through(torch.full((1, d), 1 / d, dtype=value.dtype, device=value.device))
        return value  # dropout, frozen and none, in evaluation

    def _joined(self, parts: Sequence[Affine]) -> Affine:
        """The results of several, one behind the other."""
        ends = list(accumulate(part.d_out for part in parts))
        places = _identity(ends[-1], parts[0])
        moved = [part.through(places[:, end - part.d_out : end]) for part, end in zip(parts, ends, strict=True)]
        return reduce(Affine.plus, moved)

    def _binary(self, op: str, left: ast.Expr, right: ast.Expr) -> Affine:
        a, b = self.value(left), self.value(right)
        match op, a, b:
            case "@", Tensor(), Affine():
                return b.through(a)
            case (("+" | "-"), Affine(), Affine()):
                a, b = self._widened(a, b)
                return a.plus(b if op == "+" else b.scaled(-1.0))
            case "+", Affine(), Tensor() | float():
                return self._wide(a, _length(b)).shifted(b)
            case "-", Affine(), Tensor() | float():
                return self._wide(a, _length(b)).shifted(-b)
            case "+", Tensor() | float(), Affine():
                return self._wide(b, _length(a)).shifted(a)
            case "-", Tensor() | float(), Affine():
                return self._wide(b.scaled(-1.0), _length(a)).shifted(a)
            case "*", Affine(), Tensor() | float():
                return self._wide(a, _length(b)).scaled(b)
            case "*", Tensor() | float(), Affine():
                return self._wide(b, _length(a)).scaled(a)
            case "/", Affine(), Tensor() | float():
                return self._wide(a, _length(b)).scaled(1.0 / b)
            case _:
                raise TypeError(f"`{op}` is not affine")

    def _widened(self, a: Affine, b: Affine) -> tuple[Affine, Affine]:
        return self._wide(a, b.d_out), self._wide(b, a.d_out)

    def _wide(self, value: Affine, count: int) -> Affine:
        """One feature is as many equal ones, where torch broadcasts."""
        if count in (1, value.d_out) or value.d_out != 1:
            return value
        return value.through(torch.ones(count, 1, dtype=value.dtype, device=value.device))


def _identity(size: int, like: Affine) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _length(value: Tensor | float) -> int:
    return value.shape[-1] if isinstance(value, Tensor) and value.ndim else 1
