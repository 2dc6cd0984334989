"""The products of an equation in the order that costs least, with the numbers in front of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peftc.equations.operands import Operands
from peftc.equations.rules import Operand
from peftc.equations.values import Type, Value
from peftc.syntax import ast
from peftc.syntax.walk import children, map_children, names_in

TOKENS = 256  # of the batch for which the order of products is chosen
_LONGEST = 32  # product that is put in order


class Products:
    """Rewrites the equation of a form at a place.

    The product of matrices is associative, and a number commutes with all of them: the value of
    `(alpha / r * B @ A) @ x` is the number `alpha / r` times `B @ (A @ x)`. A `let` that several
    lines name stays one part, which is computed once.

    Attributes:
        lets: these parts, by name.
    """

    def __init__(self, place: Operands) -> None:
        self.place = place
        lines = [*place.lets.values(), *([] if place.result is None else [place.result])]
        self.uses = Counter(name for line in lines for name in names_in(line))
        self.lets: dict[str, ast.Expr] = {}
        self.written: dict[tuple[int, int], ast.Expr] = {}  # products as the text has them, by their operands
        self.nodes: dict[int, tuple[float, ast.Expr]] = {}
        self.names: dict[int, str] = {}  # of parts that a `let` names, by the id of their nodes

    def factored(self, node: ast.Expr) -> tuple[float, ast.Expr]:
        """A number and an expression, of which the value is the product."""
        if id(node) not in self.nodes:
            self.nodes[id(node)] = self._factored(node)
        return self.nodes[id(node)]

    def whole(self, node: ast.Expr) -> ast.Expr:
        """The same as one expression; a number as it is written."""
        if not self._is_tensor(node):
            return node
        factor, value = self.factored(node)
        return value if factor == 1 else self.place.scaled(value, factor)

    def _is_batch(self, node: ast.Expr) -> bool:
        """Whether a matrix is another one for each token, of which no product is one matrix."""
        operand = self.place.operand(node)
        return isinstance(operand, Value) and bool(operand.type.batch)

    def _is_tensor(self, node: ast.Expr) -> bool:
        return isinstance(self.place.operand(node), Value)

    def _factored(self, node: ast.Expr) -> tuple[float, ast.Expr]:
        place = self.place
        match node:
            case ast.Name(name) if name in place.lets:
                return self._let(node, name)
            case ast.Negative(value):
                factor, value = self.factored(value)
                return -factor, value
            case ast.Binary("*", number, value) if not self._is_tensor(number):
                factor, value = self.factored(value)
                return factor * self._number(number), value
            case ast.Binary("*" | "/" as op, value, number) if not self._is_tensor(number):
                factor, value = self.factored(value)
                return (factor * self._number(number) if op == "*" else factor / self._number(number)), value
            case ast.Binary("@", left) if not self._is_batch(left):
                factor, leaves = self._chain(node)
                return factor, self._cheapest(leaves)
            case ast.Call(function, (value,)) if place.function(function) == "none":
                return self.factored(value)
            case ast.Name() | ast.Number() | ast.Boolean() | ast.Call("below" | "history"):
                return 1.0, node
            case _:
                parts = [self.whole(part) if self._is_argument(part) else part for part in children(node)]
                if all(new is old for new, old in zip(parts, children(node), strict=True)):
                    return 1.0, node
                new = iter(parts)
                return 1.0, place.derived(map_children(node, lambda old: next(new)))

    def _is_argument(self, node: ast.Expr) -> bool:
        """Whether a part of a call is one of its values, not a word such as `tokens`."""
        is_value = not isinstance(node, ast.Name) or node.id in self.place.lets
        return is_value and not self.place.random_index(node)

    def _let(self, node: ast.Name, name: str) -> tuple[float, ast.Expr]:
        value = self.place.lets[name]
        if self.uses[name] == 1:
            factor, part = self.factored(value)
            self.names.setdefault(id(part), name)
            return factor, part
        if name not in self.lets:
            self.lets[name] = self.whole(value)
            self.names.setdefault(id(self.lets[name]), name)
        return 1.0, node

    def _number(self, node: ast.Expr) -> float:
        value = self.place.operand(node)
        assert isinstance(value, int | float)
        return value

    def _chain(self, node: ast.Expr) -> tuple[float, list[ast.Expr]]:
        """The number in front of a product of matrices, and its operands."""
        match node:
            case ast.Name(name) if name in self.place.lets and self.uses[name] == 1:
                return self._chain(self.place.lets[name])
            case ast.Binary("@", left, right) if not self._is_batch(left):
                self.written[id(left), id(right)] = node
                (first, before), (second, after) = self._chain(left), self._chain(right)
                return first * second, before + after
            case ast.Negative(value):
                factor, leaves = self._chain(value)
                return -factor, leaves
            case ast.Binary("*", number, value) if not self._is_tensor(number):
                factor, leaves = self._chain(value)
                return factor * self._number(number), leaves
            case _:
                factor, value = self.factored(node)
                return factor, [value]

    def _cheapest(self, leaves: Sequence[ast.Expr]) -> ast.Expr:
        """A product in the order of the fewest operations for `TOKENS` tokens."""
        operands = [self.place.operand(leaf) for leaf in leaves]
        sizes = [*(_type(operand).size[0] for operand in operands), _columns(operands[-1])]
        count = len(leaves)
        costs: dict[tuple[int, int], int] = {(i, i): 0 for i in range(count)}
        cuts: dict[tuple[int, int], int] = {}
        is_chain = count <= _LONGEST and all(len(_type(operand).size) == 2 for operand in operands[:-1])
        for length in range(1, count if is_chain else 0):
            for start in range(count - length):
                stop = start + length

                def cost(cut: int, start: int = start, stop: int = stop) -> int:
                    return costs[start, cut] + costs[cut + 1, stop] + sizes[start] * sizes[cut + 1] * sizes[stop + 1]

                cuts[start, stop] = min(range(start, stop), key=cost)
                costs[start, stop] = cost(cuts[start, stop])

        def product(start: int, stop: int) -> ast.Expr:
            if start == stop:
                return leaves[start]
            cut = cuts.get((start, stop), start)  # from the right, as a long one is written
            left, right = product(start, cut), product(cut + 1, stop)
            return self.written.get((id(left), id(right))) or self.place.derived(ast.Binary("@", left, right))

        return product(0, count - 1)


def _type(operand: Operand) -> Type:
    assert isinstance(operand, Value)
    return operand.type


def _columns(operand: Operand) -> int:
    type_ = _type(operand)
    return TOKENS if type_.batch else type_.size[1] if len(type_.size) == 2 else 1
