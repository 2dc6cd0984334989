"""Which forms training cannot change: those with a derivative that is 0 when it begins."""

from __future__ import annotations

from collections.abc import Sequence

from peftc.equations.analysis import Place
from peftc.equations.initial_numbers import EYE, initial_number
from peftc.equations.primitives import FUNCTIONS, OPERATORS
from peftc.equations.rules import Operand, Primitive
from peftc.equations.values import Value
from peftc.equations.words import mean_over
from peftc.syntax import ast
from peftc.syntax.walk import children

CONSTANT = ("frozen", EYE)  # functions that no gradient passes
RESULT = "never trains"  # the key of a place with the result
STEP = 2.0**-20  # of difference quotients


def never_trains(place: Place) -> bool:
    """Whether the derivative of a form to each of its parameters is 0 when training starts, for
    every input. No step of gradient descent changes such parameters.

    By the chain rule a derivative is a sum over the paths from the value to a parameter. A product
    has the other operand as a factor, a function of entries its own derivative; a path is 0 where
    one of these is 0 at first. What is not known counts as different from 0: selected, pruned and
    budgeted parameters, and what passes to other layers.
    """
    if RESULT not in place.code:
        place.code[RESULT] = not _trains(place)
    return place.code[RESULT]


def _trains(place: Place) -> bool:
    trained = frozenset(name for name, line in place.parameters.items() if not line.fixed) - {*place.states}
    if not trained or place.result is None or place.layer_calls:
        return True
    gradients = FirstGradients(place, trained)
    return any(map(gradients.reach, (place.result, *place.losses.values())))


class FirstGradients:
    """Whether a gradient of an expression reaches a trained parameter when training starts."""

    def __init__(self, place: Place, trained: frozenset[str]) -> None:
        self.place, self.trained = place, trained
        self.results: dict[int, bool] = {}

    def reach(self, node: ast.Expr) -> bool:
        if id(node) not in self.results:
            self.results[id(node)] = isinstance(self.place.operand(node), Value) and self._reach(node)
        return self.results[id(node)]

    def _reach(self, node: ast.Expr) -> bool:
        place = self.place
        match node:
            case ast.Name(name) if name in place.inputs or name in place.sizes:
                return name in self.trained
            case ast.Name(name):
                return name in place.lets and self.reach(place.lets[name])
            case ast.Binary(op, left, right):
                return self._reach_operands(OPERATORS[op], (left, right))
            case ast.Item(value):
                return self.reach(value)
            case ast.Call(function) if not mean_over(node) and place.function(function) in FUNCTIONS:
                return self._reach_operands(FUNCTIONS[place.function(function)], node.args)
            case _:
                return any(map(self.reach, children(node)))

    def _reach_operands(self, primitive: Primitive, parts: Sequence[ast.Expr]) -> bool:
        operands = [self.place.operand(part) for part in parts]
        passing = (part for i, part in enumerate(parts) if not is_zero(primitive, operands, i))
        return any(map(self.reach, passing))


def is_zero(primitive: Primitive, operands: Sequence[Operand], at: int) -> bool:
    """Whether the derivative of an operation to one of its operands is 0 when training starts."""
    numbers = list(map(initial_number, operands))
    match primitive.affinity:
        case _ if primitive.name in CONSTANT:
            return True
        case "product":
            return numbers[1 - at] == 0
        case "quotient":
            return at == 1 and numbers[0] == 0
        case "nonlinear" if primitive.entries and len(numbers) == 1 and numbers[0] is not None:
            return is_flat(primitive, numbers[0])
        case "nonlinear" if primitive.name == "solve":  # A⁻¹ B
            return at == 0 and numbers[1] == 0
        case "nonlinear" if primitive.name == "power":
            return numbers[1] == 0 or (numbers[0] == 0 and numbers[1] != 1)
        case _:
            return False


def is_flat(function: Primitive, at: float) -> bool:
    """Whether the derivative of a function of entries is 0 at a number, as torch defines it where
    there is none: 0 at the kinks of `relu` and `abs`.
    """
    assert function.initial is not None
    try:
        below, value, above = (function.initial(at + step) for step in (-STEP, 0.0, STEP))
    except (ArithmeticError, ValueError):
        return False
    return None not in (below, value, above) and (below in (value, above))
