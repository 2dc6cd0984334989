"""Along which dimension the parameters of an equation are split, where features of states are.

Under tensor parallelism a rank has a part of the features of some states. What the equation says of
its dimensions decides the rest: in `B @ A @ x`, the rows of B are the features of the value, the
columns of A those of x.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

from peftc.equations.analysis import Place
from peftc.equations.definition import TextForm
from peftc.equations.primitives import FUNCTIONS
from peftc.equations.rules import Primitive
from peftc.equations.values import Type, Value
from peftc.forms.shapes import KeyValue, Scalar
from peftc.planning import ir
from peftc.rewriting.edits import RegionEdit, is_inline, place_of
from peftc.syntax import ast
from peftc.syntax.printer import print_expression

Dimension = int | None  # None: whole
Dimensions = Mapping[str, Dimension]


class NotDerivable(Exception):
    """A part of an equation of which each rank needs the whole."""

    def __init__(self, node: ast.Node, text: str) -> None:
        super().__init__(text)
        self.node, self.text = node, text


def edit_dimensions(edit: RegionEdit, states: Dimensions) -> dict[str, dict[str, Dimension]]:
    """Of each form of an edit, by its key, the dimension along which each parameter is split.

    Args:
        states: of the type of each state without its batch, the dimension that is split.

    Raises: NotDerivable.
    """
    terms = _Terms(edit, states)
    for assign in edit.assigns:
        terms.visit(assign.value, states.get(assign.state))
    return terms.forms


class _Terms:
    def __init__(self, edit: RegionEdit, states: Dimensions) -> None:
        self.edit, self.states = edit, states
        self.forms: dict[str, dict[str, Dimension]] = {}

    def visit(self, term: ir.Term, wanted: Dimension) -> Dimension:
        """The dimension along which a value is split: `wanted`, or that of its operands."""
        match term:
            case ir.Read(state=state):
                return self.states.get(state)
            case ir.Constant():
                return None
            case ir.Arithmetic(left=left, right=right):
                own = wanted if wanted is not None else self.natural(term)
                for side in (left, right):
                    self.visit(side, None if isinstance(side.shape, Scalar) else own)
                return own
            case ir.FormCall():
                return self.visit_form(term, wanted)
            case ir.Concat(parts=parts) if isinstance(term.shape, KeyValue):
                for part in parts:
                    self.visit(part, wanted)
                return wanted
            case _:
                raise NotDerivable(term.source, print_expression(term.source))

    def natural(self, term: ir.Term) -> Dimension:
        match term:
            case ir.Read(state=state):
                return self.states.get(state)
            case ir.Arithmetic(left=left, right=right):
                sides = (side for side in (left, right) if not isinstance(side.shape, Scalar))
                return next((own for own in map(self.natural, sides) if own is not None), None)
            case ir.FormCall(instance=instance) if is_inline(instance):
                equation = Equation(place_of(instance), tuple(map(self.natural, term.inputs)))
                return equation.natural(equation.result)
            case _:
                return None

    def visit_form(self, call: ir.FormCall, wanted: Dimension) -> Dimension:
        instance = call.instance
        source = print_expression(call.source)
        if not isinstance(instance.form, TextForm) or not is_inline(instance) or instance.owner is not None:
            raise NotDerivable(call.source, source)
        place = place_of(instance)
        if place.selection or place.budget or place.pruning or place.states or place.losses or place.layer_calls:
            raise NotDerivable(call.source, source)
        inputs = tuple(self.visit(term, None) for term in call.inputs)
        equation = Equation(place, inputs, self.forms.get(instance.key))
        result = equation.visit(equation.result, wanted)
        if any(line.fixed for line in place.parameters.values()):
            raise NotDerivable(call.source, source)
        self.forms[instance.key] = equation.dimensions
        return result


class Equation:
    """The equation of a form, of whose inputs some are split."""

    def __init__(
        self, place: Place, inputs: Iterable[Dimension], dimensions: dict[str, Dimension] | None = None
    ) -> None:
        assert place.result is not None
        self.place, self.result = place, place.result
        self.inputs = dict(zip(place.inputs, inputs, strict=False))
        self.dimensions: dict[str, Dimension] = {} if dimensions is None else dimensions

    def visit(self, node: ast.Expr, wanted: Dimension) -> Dimension:  # noqa: RET503  # `refuse` raises
        """The dimension of a value's type along which it is split. Raises: NotDerivable."""
        match node:
            case ast.Pair(keys, values):
                return self.visit(values, self.visit(keys, wanted))
            case _ if not self.is_tensor(node):
                return None
            case ast.Name(name) if name in self.inputs:
                return self.inputs[name]
            case ast.Name(name) if name in self.place.sizes:
                return self.split(node, name, wanted)
            case ast.Name(name) if name in self.place.lets:
                return self.visit(self.place.lets[name], wanted)
            case ast.Negative(value):
                return self.visit(value, wanted)
            case ast.Binary("@", left, right):
                return self.visit_product(node, left, right, wanted)
            case ast.Binary(_, left, right):
                return self.visit_entries(node, (left, right), wanted)
            case ast.Call(_, args) if (row := self.primitive(node)) is not None and row.entries:
                return self.visit_entries(node, args, wanted)
            case _:
                self.refuse(node)

    def visit_entries(self, node: ast.Expr, operands: Iterable[ast.Expr], wanted: Dimension) -> Dimension:
        """Dimensions of operands are aligned from the right, as torch broadcasts."""
        own = self.natural(node) if wanted is None else wanted
        for operand in filter(self.is_tensor, operands):
            self.visit(operand, self.aligned(node, operand, own))
        return own

    def visit_product(self, node: ast.Expr, left: ast.Expr, right: ast.Expr, wanted: Dimension) -> Dimension:
        """[m, n] @ [n] or [m, n] @ [n, p]: of a split n, each rank has one part of the sum."""
        if self.type(left).batch or len(self.type(left).size) != 2 or self.has_heads(right):
            self.refuse(node)
        is_sum = self.natural(right) == 0
        if (is_sum and wanted is not None) or self.natural(left) is not None:
            self.refuse(node)
        self.visit(left, 1 if is_sum else 0 if wanted == 0 else None)
        self.visit(right, 0 if is_sum else 1 if wanted == 1 else None)
        return wanted

    def natural(self, node: ast.Expr) -> Dimension:
        """The dimension along which a value is split because its inputs are."""
        match node:
            case ast.Pair() | ast.Number():
                return None
            case _ if not self.is_tensor(node):
                return None
            case ast.Name(name) if name in self.inputs:
                return self.inputs[name]
            case ast.Name(name) if name in self.place.lets:
                return self.natural(self.place.lets[name])
            case ast.Negative(value):
                return self.natural(value)
            case ast.Binary("@", left, right):
                return 0 if self.natural(left) == 0 else 1 if self.natural(right) == 1 else None
            case ast.Binary(_, left, right):
                return self.natural_of_entries(node, (left, right))
            case ast.Call(_, args) if (row := self.primitive(node)) is not None and row.entries:
                return self.natural_of_entries(node, args)
            case _:
                return None

    def natural_of_entries(self, node: ast.Expr, operands: Iterable[ast.Expr]) -> Dimension:
        for operand in filter(self.is_tensor, operands):
            if (own := self.natural(operand)) is not None:
                return own + len(self.type(node).size) - len(self.type(operand).size)
        return None

    def aligned(self, node: ast.Expr, operand: ast.Expr, dimension: Dimension) -> Dimension:
        """The dimension of an operand that becomes that of the value; None for one of size 1."""
        if dimension is None:
            return None
        size = self.type(operand).size
        own = dimension - (len(self.type(node).size) - len(size))
        return own if own >= 0 and size[own] != 1 else None

    def split(self, node: ast.Name, name: str, dimension: Dimension) -> Dimension:
        if self.dimensions.setdefault(name, dimension) != dimension:
            self.refuse(node)
        return dimension

    def primitive(self, node: ast.Call) -> Primitive | None:
        return FUNCTIONS.get(self.place.function(node.function))

    def is_tensor(self, node: ast.Expr) -> bool:
        return isinstance(self.place.operand(node), Value)

    def type(self, node: ast.Expr) -> Type:
        return self.place.type_of(node)

    def has_heads(self, node: ast.Expr) -> bool:
        return bool(self.type(node).batch) and len(self.type(node).size) != 1

    def refuse(self, node: ast.Expr) -> NoReturn:
        raise NotDerivable(node, print_expression(node))
