"""What an expression stands for at a place: a number, or what is known of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from peftc.equations.initial_numbers import EYE, first_value, initial_value, reason_against, shifts, undefined_at_first
from peftc.equations.matrices import DECOMPOSITIONS
from peftc.equations.primitives import FUNCTIONS, OF_PAIRS, OF_VALUES, OPERATORS, WORDS, place_help
from peftc.equations.rules import Mismatch, Operand, Primitive
from peftc.equations.values import NUMBERS_OF_SITES, FormError, Number, SiteNumbers, Type, Value, pair_of, real, shown
from peftc.equations.words import (
    BELOW,
    MEANS,
    NONE,
    NUMBERS,
    OUT,
    OVER_SITES,
    POSITIONS,
    PRUNED,
    PRUNED_PARTS,
    RANDOM,
    SIZES,
    is_drawn,
    is_random,
    mean_over,
    without_size,
    words_of,
)
from peftc.forms.shapes import KeyValue
from peftc.syntax import ast
from peftc.syntax.numbers import ARITHMETIC, numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import children, names_in

_MOST = 2**40  # of a size


class Missing(int):
    """The value of a parameter whose line is not there: it adds nothing."""


MISSING = Missing(0)


@dataclass
class Operands:
    """The values of the arguments, parameters and parts of a form.

    Attributes:
        numbers: the arguments, by name.
        types: those of inputs and of `out`, by name.
        sizes: of the parameters that exist, by name.
        result: the expression of the form's value.
        pair: the keys and values that it writes.
        values: the parts of the equation, by the id of their nodes.
    """

    form: ast.Form
    numbers: dict[str, Number]
    types: dict[str, Type]
    inputs: tuple[str, ...]
    widest: dict[str, int] = field(default_factory=dict[str, int])  # features of any site, by the names of states
    numbers_of_site: SiteNumbers = field(default_factory=SiteNumbers)
    parameters: dict[str, ast.Parameter] = field(default_factory=dict[str, ast.Parameter])
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    absent: set[str] = field(default_factory=set[str])  # parameters of lines that are not there
    tensors: dict[str, str] = field(default_factory=dict[str, str])  # of parameters with other names
    copies: dict[str, str] = field(default_factory=dict[str, str])  # of parameters, with their first values
    lets: dict[str, ast.Expr] = field(default_factory=dict[str, ast.Expr])
    result: ast.Expr | None = None
    pair: KeyValue | None = None  # the keys and values that the form writes
    derived_nodes: list[ast.Expr] = field(default_factory=list[ast.Expr])  # kept: the values have their ids
    values: dict[int, Operand] = field(default_factory=dict[int, Operand])
    costs: dict[int, int] = field(default_factory=dict[int, int])  # FLOPs of the parts, by the id of their nodes

    def derived(self, node: ast.Expr) -> ast.Expr:
        """A new expression, of which all parts fit."""
        self.derived_nodes.append(node)
        self.operand(node)
        return node

    def scaled(self, node: ast.Expr, factor: float) -> ast.Expr:
        """An expression times a number."""
        number = ast.Number(factor)
        self.values[id(number)] = factor
        return self.derived(ast.Binary("*", number, node))

    def argument(self, node: ast.Expr) -> Number:
        """A number, or a word such as `none`, which the heads of a state without heads are, too."""
        match node:
            case ast.Name(word) if word in self.words and word not in (*self.numbers, *self.sizes, *self.lets):
                return word
            case ast.Call("heads" | "d_head", (ast.Name(state),)) if not self._has_heads(state):
                return NONE
            case ast.Call("rows" | "cols", (ast.Name(state),)) if not self._is_weight(state):
                return NONE
            case _:
                return self.number(node)

    @cached_property
    def words(self) -> frozenset[str]:
        """What conditions compare arguments with."""
        return frozenset({NONE, *(word for own in words_of(self.form).values() for word in own)})

    def _has_heads(self, state: str) -> bool:
        return state in self.types and bool(self.types[state].batch) and len(self.types[state].size) == 2

    def _is_weight(self, state: str) -> bool:
        return state in self.types and not self.types[state].batch and len(self.types[state].size) == 2

    def tensor(self, name: str) -> str:
        """The name of the tensor of a parameter."""
        return self.tensors.get(name, name)

    # Numbers

    def number(self, node: ast.Expr) -> Number:
        """The value of an expression that is known when the plan is made. Raises: FormError."""
        value = self.operand(node)
        if isinstance(value, Value):
            raise FormError("P105", f"expected a number, `{print_expression(node)}` is {value.type}", node)
        return value

    def size(self, node: ast.Expr) -> int:
        """A dimension of a parameter. Raises: FormError P318."""
        value = self.number(node)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
        whole = int(value) if is_number else -1
        if whole != value or whole < 1:
            text = f"the size `{print_expression(node)}` of a parameter is {shown(value)}"
            raise FormError("P318", f"{text}, and must be a whole number of at least 1", node)
        return whole

    # Values

    def operand(self, node: ast.Expr) -> Operand:
        """The number, or what is known of the tensor, that an expression stands for."""
        if id(node) not in self.values:
            self.values[id(node)] = self._operand(node)
        return self.values[id(node)]

    def _operand(self, node: ast.Expr) -> Operand:
        match node:
            case ast.Number():
                return numeric_value(node)
            case ast.Boolean(value):
                return value
            case ast.Name(name):
                return self._name(node, name)
            case ast.Negative(value):
                inner = self.operand(value)
                if isinstance(inner, Value):
                    return self._apply(OPERATORS["*"], (-1, inner), node)
                return inner if isinstance(inner, Missing) else -real(inner, node)
            case ast.Binary(op, left, right):
                return self._binary(node, op, self.operand(left), self.operand(right))
            case ast.Call(function) if function == RANDOM:
                help_ = "name it, `let i = random(n)`, and write `A[i]`"
                raise FormError("P105", f"`{print_expression(node)}` is an index, not a value", node, help_)
            case ast.Call(function) if function == BELOW:
                raise FormError("P105", f"`{print_expression(node)}` is known in parts of the value alone", node)
            case ast.Call(function):
                return self._call(node, function)
            case ast.Item(value, indices):
                return self._item(node, value, indices)
            case ast.Pair(keys, values):
                return pair_of(node, self.operand(keys), self.operand(values))
            case ast.Attribute(ast.Call(function) as call, name) if function == PRUNED and name in PRUNED_PARTS:
                self.operand(call)
                return Value(Type((self.size(call.args[2]),)))
            case ast.Attribute(ast.Call(function, args), name) if f"{function}.{name}" in DECOMPOSITIONS:
                operands = tuple(map(self.operand, args))
                if len(operands) != DECOMPOSITIONS[f"{function}.{name}"].operands[0]:
                    raise FormError("P108", f"`{print_expression(node)}` has {len(operands)} operands", node)
                return self._apply(DECOMPOSITIONS[f"{function}.{name}"], operands, node)
            case _:
                raise FormError("P105", f"`{print_expression(node)}` has no meaning in the equation of a form", node)

    def _name(self, node: ast.Name, name: str) -> Operand:
        if name in self.inputs:
            type_ = self.types[name]
            rank = type_.size[-1] if type_.batch and type_.size else None
            return Value(type_, varies=True, rank=rank, first=name)
        if name in self.sizes:
            initial = self.initial(self.parameters[name])
            return Value(Type(self.sizes[name]), initial, shifted=True, first=self._first(self.parameters[name]))
        if name in self.lets:
            return self.operand(self.lets[name])
        if name in self.absent:
            return MISSING
        if name in self.numbers:
            return self.numbers[name]
        if any(isinstance(line, ast.Let) and line.name == name for line in self.form.body):
            raise FormError("P107", f"no condition of `{name}` holds here", node)
        if name in WORDS:
            return name
        if name in self.types:  # a weight of the base, from which a first value is computed
            return Value(self.types[name], shifted=True, first=name)
        raise FormError("P310", f"`{name}` is a weight of the base, and this edit writes none", node)

    def _first(self, parameter: ast.Parameter) -> str:
        """The first value of a parameter, as a function of the base's weight or by its own name."""
        value, own = parameter.value, f"param {self.copies.get(parameter.name, parameter.name)}"
        if isinstance(value, ast.Name) or is_drawn(value) or "w" not in names_in(value):
            return EYE if value == ast.Name("identity") and "identity" not in self.numbers else own
        return operand.first if isinstance(operand := self.operand(value), Value) else own

    def initial(self, parameter: ast.Parameter) -> float | None:
        """The number that a parameter starts as; None for other values."""
        match parameter.value:
            case ast.Name("zeros" | "ones" as name) if name not in self.numbers:
                return float(name == "ones")
            case ast.Name(name) if name not in self.numbers:
                return None
            case value:
                try:
                    return float(self.number(value))
                except (FormError, ValueError):
                    return None

    def _binary(self, node: ast.Binary, op: str, left: Operand, right: Operand) -> Operand:
        if isinstance(right, Missing) and not isinstance(left, Value) and left == 0 and op in "+-":
            return right
        if op not in "+-":
            for side, part in ((left, node.left), (right, node.right)):
                if isinstance(side, Missing) and not (op == "/" and part is node.right):
                    message = f"`{print_expression(part)}` is not there: what is missing adds nothing, and is no factor"
                    raise FormError("P105", message, part, "write another line for the case without it")
        if isinstance(left, Value) or isinstance(right, Value):
            for side, part in ((left, node.left), (right, node.right)):
                if not isinstance(side, Value):
                    real(side, part)
            if op in "+-" and not isinstance(right, Value) and right == 0:
                return left
            if op == "+" and not isinstance(left, Value) and left == 0:
                return right
            return self._apply(OPERATORS[op], (left, right), node)
        a, b = real(left, node.left), real(right, node.right)
        if op == "@":
            raise FormError("P301", "`@` multiplies tensors, not numbers", node)
        if op == "/" and b == 0:
            raise FormError("P120", f"`{print_expression(node)}` divides by zero", node)
        value = ARITHMETIC[op](a, b)
        return int(value) if op == "/" and isinstance(a, int) and isinstance(b, int) and a % b == 0 else value

    def _call(self, node: ast.Call, function: str) -> Operand:
        if function in SIZES:
            return self._size_of(node, function)
        function = self.function(function)
        if function == OVER_SITES and self.numbers_of_site.over_sites:
            return self.numbers_of_site.over_sites
        if function == POSITIONS and len(node.args) in (3, 4):
            value, *ends = node.args
            return self._positions(node, self.operand(value), [self.argument(end) for end in ends])
        if over := mean_over(node):
            return self._apply(FUNCTIONS[MEANS[over]], (self.operand(node.args[0]),), node)
        operands = tuple(map(self.operand, node.args))
        if function in NUMBERS and not any(isinstance(value, Value) for value in operands):
            numbers = [real(value, arg) for value, arg in zip(operands, node.args, strict=True)]
            try:
                return NUMBERS[function](*numbers)
            except (TypeError, ValueError, ArithmeticError):
                raise FormError("P120", f"`{print_expression(node)}` cannot be computed", node) from None
        if function in NUMBERS and function not in FUNCTIONS:
            raise FormError("P105", f"`{function}` is a function of numbers", node, OF_VALUES.get(function))
        if (primitive := FUNCTIONS.get(function)) is None:
            raise FormError("P101", f"there is no function `{function}`", node)
        least, most = primitive.operands
        if not least <= len(operands) <= most:
            raise FormError("P108", f"`{primitive.signature}` has {len(operands)} operands here", node)
        return self._apply(primitive, operands, node)

    def _positions(self, node: ast.Call, value: Operand, ends: Sequence[Number]) -> Operand:
        """A value at some tokens; at all of them where no number is given."""
        result = self._apply(FUNCTIONS[POSITIONS], (value, *ends), node)
        if any(end != NONE for end in ends) or not isinstance(value, Value) or not isinstance(result, Value):
            return result
        return value

    def function(self, name: str) -> str:
        """The name of a function, for which an argument may stand: `act` for `relu`."""
        value = self.numbers.get(name)
        return value if isinstance(value, str) else name

    def _size_of(self, node: ast.Call, function: str) -> int:
        (argument,) = node.args
        name = argument.id if isinstance(argument, ast.Name) else ""
        if function in NUMBERS_OF_SITES:
            return getattr(self.numbers_of_site, function)
        type_ = self.types.get(name)
        if name == OUT and self.pair is not None and function in ("heads", "d_head", "d_value"):
            d_value = self.pair.d_value or self.pair.d_head
            return {"heads": self.pair.kv_heads, "d_head": self.pair.d_head, "d_value": d_value}[function]
        if type_ is None:
            code = "P310" if name in (*self.inputs, OUT) else "P107"
            help_ = OF_PAIRS if name == OUT and self.pair is not None else None
            raise FormError(code, f"`{print_expression(argument)}` has no sizes here", argument, help_)
        if function == "widest" and len(type_.size) == 1:
            return self.widest.get(name) or type_.size[0]
        match function, type_.size:
            case "d", (d,):
                return d
            case ("entries", _) if not type_.batch:
                return type_.entries
            case ("heads", (heads, _)) if type_.batch:
                return heads
            case ("d_head", (_, d_head)) if type_.batch:
                return d_head
            case ("rows", (d_out, _)) if self._is_weight(name):
                return d_out
            case ("cols", (_, d_in)) if self._is_weight(name):
                return d_in
            case _:
                kind = "a weight" if self._is_weight(name) else "hidden states" if type_.batch else "a vector"
                message = without_size(function, name, f"{kind} {type_}")
                raise FormError("P310", message, node, place_help(function, type_))

    def _item(self, node: ast.Item, value: ast.Expr, indices: Sequence[ast.Expr]) -> Operand:
        owner = self.operand(value)
        if isinstance(owner, Missing):
            return owner
        if not isinstance(owner, Value) or owner.type.batch == "ids":
            raise FormError("P301", f"`{print_expression(value)}` has no items: a parameter has", value)
        size, count = owner.type.size, len(indices)
        if count > len(size):
            raise FormError("P301", f"{owner.type} has fewer dimensions than indices", node)
        if any(map(self.random_index, indices)):
            self._check_random(node, indices, owner.type)
            indices = ()
        for index, limit in zip(indices, size, strict=False):
            number = self.number(index)
            if not isinstance(number, int) or not 0 <= number < limit:
                raise FormError("P106", f"the index {shown(number)} is not in 0..{limit - 1}", index)
        rank = 1 if owner.type.batch and count == len(size) else None
        return Value(owner.type.item(count), owner.initial, owner.varies, owner.reason, owner.shifted, rank)

    # Random numbers

    @property
    def random_numbers(self) -> tuple[str, ...]:
        """The names of the random numbers, in their order."""
        return tuple(name for name, value in self.lets.items() if is_random(value))

    def random_index(self, index: ast.Expr) -> str:
        """The name of the random number that an index is; empty for other indices."""
        return index.id if isinstance(index, ast.Name) and is_random(self.lets.get(index.id)) else ""

    def random_count(self, name: str) -> int:
        """The n of `let i = random(n)`."""
        value = self.lets[name]
        assert isinstance(value, ast.Call)
        return self.size(value.args[0])

    def _check_random(self, node: ast.Item, indices: Sequence[ast.Expr], type_: Type) -> None:
        """Raises: FormError if a random number is not the one index of as many parts."""
        name = self.random_index(indices[0])
        if len(indices) > 1 or not name or type_.batch:
            raise FormError("P105", f"a random number is a parameter's only index, as in `A[{name or 'i'}]`", node)
        if self.random_count(name) != type_.size[0]:
            message = f"`{name}` is one of {self.random_count(name)} numbers, and there are {type_.size[0]} parts"
            raise FormError("P106", message, indices[0])

    def type_of(self, node: ast.Expr) -> Type:
        """The type of a tensor."""
        value = self.operand(node)
        assert isinstance(value, Value)
        return value.type

    # The rules of all primitives

    def _apply(self, primitive: Primitive, operands: Sequence[Operand], node: ast.Expr) -> Operand:
        types = [operand.type if isinstance(operand, Value) else operand for operand in operands]
        try:
            type_ = primitive.type(types)
        except Mismatch as error:
            parts = children(node)
            at = parts[error.operand] if error.operand is not None and error.operand < len(parts) else node
            raise FormError(error.code, f"`{print_expression(node)}`: {error.message}", at, error.help) from None
        if (undefined := undefined_at_first(primitive, operands, print_expression(node))) is not None:
            raise FormError("P120", undefined[0], node, undefined[1])
        self.costs[id(node)] = primitive.flops(types, type_) if primitive.flops is not None else 0
        varying = [v for v in operands[: 1 if primitive.only_first else None] if isinstance(v, Value) and v.varies]
        rank = primitive.rank(operands) if primitive.rank is not None else None
        return Value(
            type_,
            initial_value(primitive, operands),
            bool(varying),
            next((value.reason for value in varying if value.reason), None) or self._reason(primitive, operands, node),
            shifts(primitive, operands),
            rank,
            first_value(primitive, operands),
        )

    def _reason(self, primitive: Primitive, operands: Sequence[Operand], node: ast.Expr) -> str | None:
        name = node.function if isinstance(node, ast.Call) else ""
        choice = f" with `{name}={self.function(name)}`" if self.function(name) != name else ""
        return reason_against(primitive, operands, print_expression(node), choice)
