"""The equation of a form at a place: the type of each part, and what else follows from the rows of
its primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peftc.equations.initial_numbers import initial_number, initial_value, shifts
from peftc.equations.primitives import ACTIVATIONS, FUNCTIONS, INITIAL_VALUES, NUMBERS, OPERATORS, SIZES, Primitive
from peftc.equations.rules import Mismatch, Operand
from peftc.equations.values import FormError, Number, Type, Value, type_of
from peftc.forms.registry import Args, Dims
from peftc.forms.shapes import Tokens, Vector, Weight
from peftc.syntax import ast
from peftc.syntax.numbers import ARITHMETIC, COMPARISONS, numeric_value
from peftc.syntax.printer import print_expression
from peftc.syntax.walk import children, names_in

OUT = "out"  # the name of the state that the equation writes, in sizes
TOKENS = "tokens"  # `mean(x, tokens)`
_MOST = 2**40  # of a size
_DIMENSIONS = {"kaiming": 1, "orthogonal": 2, "identity": 2}  # that a first value needs


@dataclass
class Place:
    """A form with its arguments at a place: the values of its numbers, parameters and parts.

    Attributes:
        numbers: the arguments, by name.
        types: those of inputs and of `out`, by name.
        sizes: of the parameters that exist, by name.
        values: the parts of the equation, by the id of their nodes.
    """

    form: ast.Form
    numbers: dict[str, Number]
    types: dict[str, Type]
    inputs: tuple[str, ...]
    parameters: dict[str, ast.Parameter] = field(default_factory=dict[str, ast.Parameter])
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    lets: dict[str, ast.Expr] = field(default_factory=dict[str, ast.Expr])
    values: dict[int, Operand] = field(default_factory=dict[int, Operand])
    result: ast.Expr | None = None
    costs: dict[int, int] = field(default_factory=dict[int, int])  # FLOPs of the parts, by the id of their nodes
    code: dict[object, Any] = field(default_factory=dict[object, Any])  # the functions that compute it

    @property
    def value(self) -> Value:
        """The value of the form."""
        assert self.result is not None
        value = self.operand(self.result)
        if isinstance(value, Value):
            return value
        message = f"the value of `{self.form.name}` is the number {_shown(value)}: it has no parameter and no input"
        raise FormError("P301", message, self.result)

    @property
    def flops(self) -> int:
        """The floating-point operations of one token, each part of the equation computed once."""
        self.value  # noqa: B018  # all parts are known after it
        return sum(self.costs.values())

    def read(self) -> Place:
        """Reads the lines of the form in order. Raises: FormError."""
        for line in self.form.body:
            match line:
                case ast.Require(left, op, right):
                    self._require(line, left, op, right)
                case ast.Parameter(name):
                    if line.condition is not None and not self.number(line.condition):
                        self.numbers[name] = 0  # what is not there adds nothing
                        continue
                    sizes = tuple(map(self.size, line.sizes))
                    self._check_initial(line, sizes)
                    self.parameters[name], self.sizes[name] = line, sizes
                case ast.Let(name, value):
                    self.lets[name] = value
                case ast.Equation(value=value):
                    self.result = value
        assert self.result is not None
        self.value  # noqa: B018  # raises what has no meaning
        return self

    def _require(self, line: ast.Require, left: ast.Expr, op: str, right: ast.Expr) -> None:
        a, b = self.number(left), self.number(right)
        if op not in ("==", "!="):
            a, b = _real(a, left), _real(b, right)
        if not COMPARISONS[op](a, b):
            texts = [
                f"`{print_expression(side)}` is {_shown(value)}"
                for side, value in ((left, a), (right, b))
                if not isinstance(side, ast.Number)
            ]
            text = f"`{self.form.name}` requires {print_expression(left)} {op} {print_expression(right)}"
            raise FormError("P317", f"{text}: {' and '.join(texts)}", line)

    def _check_initial(self, line: ast.Parameter, sizes: tuple[int, ...]) -> None:
        """Raises: FormError P318 if a first value has other entries than its parameter."""
        node = line.value
        name = node.id if isinstance(node, ast.Name) else node.function if isinstance(node, ast.Call) else ""
        if name in INITIAL_VALUES and name not in self.numbers:
            least = _DIMENSIONS.get(name, 0)
            if len(sizes) < least or (least == 2 and len(sizes) > 2):
                wanted = "a matrix" if least == 2 else "one with sizes"
                message = f"`{name}` is a first value of {wanted}, and `{line.name}` is {Type(sizes)}"
                raise FormError("P318", message, node)
            for part in node.args if isinstance(node, ast.Call) else ():
                if _real(self.number(part), part) < 0:
                    raise FormError("P106", f"`{print_expression(part)}` is a deviation or a bound, and below 0", part)
            return
        if others := [name for name in self._names(node) if name in self.sizes]:
            message = f"a first value is computed from numbers and weights of the base, not from `{others[0]}`"
            raise FormError("P318", message, node)
        value = self.operand(node)
        if not isinstance(value, Value):
            _real(value, node)
        elif value.type.batch or _without_ones(value.type.size) != _without_ones(sizes):
            message = f"`{line.name}` is {Type(sizes)}, and its first value `{print_expression(node)}` is {value.type}"
            raise FormError("P318", message, node)

    def _names(self, node: ast.Expr) -> set[str]:
        """The names in an expression, and in the parts that it names."""
        names = set(names_in(node))
        return names.union(*(self._names(self.lets[name]) for name in names & self.lets.keys()))

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
            text = f"the size `{print_expression(node)}` of a parameter is {_shown(value)}"
            raise FormError("P318", f"{text}, not a whole number above 0", node)
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
                return -_real(inner, node)
            case ast.Binary(op, left, right):
                return self._binary(node, op, self.operand(left), self.operand(right))
            case ast.Call(function):
                return self._call(node, function)
            case ast.Item(value, indices):
                return self._item(node, value, indices)
            case _:
                raise FormError("P105", f"`{print_expression(node)}` has no meaning in the equation of a form", node)

    def _name(self, node: ast.Name, name: str) -> Operand:
        if name in self.inputs:
            type_ = self.types[name]
            rank = type_.size[-1] if type_.batch and type_.size else None
            return Value(type_, varies=True, rank=rank)
        if name in self.sizes:
            initial = self.initial(self.parameters[name])
            return Value(Type(self.sizes[name]), initial, shifted=True)
        if name in self.numbers:
            return self.numbers[name]
        if name in self.lets:
            return self.operand(self.lets[name])
        if name in ACTIVATIONS:
            return name
        if name in self.types:  # a weight of the base, from which a first value is computed
            return Value(self.types[name], shifted=True)
        raise FormError("P310", f"`{name}` is a weight of the base, and this edit writes none", node)

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
        if isinstance(left, Value) or isinstance(right, Value):
            for side, part in ((left, node.left), (right, node.right)):
                if not isinstance(side, Value):
                    _real(side, part)
            if op in "+-" and not isinstance(right, Value) and right == 0:
                return left
            if op == "+" and not isinstance(left, Value) and left == 0:
                return right
            return self._apply(OPERATORS[op], (left, right), node)
        a, b = _real(left, node.left), _real(right, node.right)
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
        if function == "mean" and len(node.args) == 2 and node.args[1] == ast.Name(TOKENS):
            return self._apply(FUNCTIONS["token_mean"], (self.operand(node.args[0]),), node)
        operands = tuple(map(self.operand, node.args))
        if function in NUMBERS and not any(isinstance(value, Value) for value in operands):
            numbers = [_real(value, arg) for value, arg in zip(operands, node.args, strict=True)]
            try:
                return NUMBERS[function](*numbers)
            except (TypeError, ValueError, ArithmeticError):
                raise FormError("P120", f"`{print_expression(node)}` cannot be computed", node) from None
        if function in NUMBERS:
            raise FormError("P105", f"`{function}` is a function of numbers", node)
        primitive = FUNCTIONS.get(function)
        if primitive is None:
            raise FormError("P101", f"there is no function `{function}`", node)
        if not primitive.least <= len(operands) <= primitive.most:
            raise FormError("P108", f"`{primitive.signature}` has {len(operands)} operands here", node)
        return self._apply(primitive, operands, node)

    def function(self, name: str) -> str:
        """The name of a function, for which an argument may stand: `act` for `relu`."""
        value = self.numbers.get(name)
        return value if isinstance(value, str) else name

    def _size_of(self, node: ast.Call, function: str) -> int:
        (argument,) = node.args
        name = argument.id if isinstance(argument, ast.Name) else ""
        type_ = self.types.get(name)
        if type_ is None:
            raise FormError("P107", f"`{print_expression(argument)}` has no sizes here", argument)
        is_weight = not type_.batch and len(type_.size) == 2
        match function, type_.size:
            case "d", (d,):
                return d
            case ("heads", (heads, _)) if type_.batch:
                return heads
            case ("d_head" | "d", (_, d_head)) if type_.batch:
                return d_head
            case ("rows", (d_out, _)) if is_weight:
                return d_out
            case ("cols", (_, d_in)) if is_weight:
                return d_in
            case _:
                raise FormError("P310", f"`{function}` is {SIZES[function]}, and `{name}` is {type_}", node)

    def _item(self, node: ast.Item, value: ast.Expr, indices: Sequence[ast.Expr]) -> Operand:
        owner = self.operand(value)
        if not isinstance(owner, Value) or owner.type.batch:
            raise FormError("P301", f"`{print_expression(value)}` has no items: a parameter has", value)
        size = owner.type.size
        if len(indices) > len(size):
            raise FormError("P301", f"{owner.type} has fewer dimensions than indices", node)
        for index, limit in zip(indices, size, strict=False):
            number = self.number(index)
            if not isinstance(number, int) or not 0 <= number < limit:
                raise FormError("P106", f"the index {_shown(number)} is not in 0..{limit - 1}", index)
        return Value(Type(size[len(indices) :]), owner.initial, owner.varies, owner.reason, owner.shifted)

    # The rules of all primitives

    def _apply(self, primitive: Primitive, operands: Sequence[Operand], node: ast.Expr) -> Operand:
        types = [operand.type if isinstance(operand, Value) else operand for operand in operands]
        try:
            type_ = primitive.type(types)
        except Mismatch as error:
            parts = children(node)
            at = parts[error.operand] if error.operand is not None and error.operand < len(parts) else node
            raise FormError(error.code, f"`{print_expression(node)}`: {error.message}", at, error.help) from None
        if primitive.name == "/" and initial_number(operands[1]) == 0:
            when = "" if not isinstance(operands[1], Value) else " when training starts"
            raise FormError("P120", f"`{print_expression(node)}` divides by zero{when}", node)
        self.costs[id(node)] = primitive.flops(types, type_) if primitive.flops is not None else 0
        varying = [operand for operand in operands if isinstance(operand, Value) and operand.varies]
        rank = primitive.rank(operands) if primitive.rank is not None else None
        return Value(
            type_,
            initial_value(primitive, operands),
            bool(varying),
            next((value.reason for value in varying if value.reason), None) or self._reason(primitive, operands, node),
            shifts(primitive, operands),
            rank,
        )

    def _reason(self, primitive: Primitive, operands: Sequence[Operand], node: ast.Expr) -> str | None:
        varying = [isinstance(operand, Value) and operand.varies for operand in operands]
        if not any(varying):
            return None
        text = print_expression(node)
        name = node.function if isinstance(node, ast.Call) else ""
        choice = f", with `{name}={self.function(name)}`," if self.function(name) != name else ""
        match primitive.affinity:
            case "linear" | "sum":
                return None
            case "product":
                return f"`{text}` multiplies two values that depend on the input" if sum(varying) > 1 else None
            case "quotient":
                return f"`{text}` divides by a value that depends on the input" if varying[1] else None
            case "nonlinear":
                return f"`{text}`{choice} is not linear in the input"


def _without_ones(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in size if n != 1)


def _real(value: Operand, node: ast.Expr) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise FormError("P105", f"expected a number, found `{print_expression(node)}`", node)


def _shown(value: Number) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _check_second(form: ast.Form, inputs: tuple[str, ...], dims: Dims) -> None:
    """Raises: FormError for a second input that is missing, of other tokens, or beside a weight."""
    at = next(param for param in form.params if param.name == inputs[1])
    if dims.second is None:
        raise FormError("P108", f"`{form.name}` reads `{inputs[0]}` and `{inputs[1]}`: give both", at)
    if isinstance(dims.target, Weight | Vector):
        raise FormError("P310", "a form of two inputs reads hidden states, and this edit writes a weight", at)
    tokens = [shape.of for shape in (dims.input, dims.second) if isinstance(shape, Tokens)]
    if len(set(tokens)) > 1:
        raise FormError("P301", f"its inputs are of different tokens: {dims.input} and {dims.second}", at)


def place_of(form: ast.Form, inputs: tuple[str, ...], args: Args, dims: Dims) -> Place:
    """A form at a place. Raises: FormError if its equation has no meaning there."""
    types: dict[str, Type] = {}
    for name, shape in ((OUT, dims.target), *zip(inputs, (dims.input, dims.second), strict=False)):
        if shape is None:
            continue
        type_ = type_of(shape)
        if type_ is None:
            raise FormError("P310", f"the equation of `{form.name}` has no values like {shape}", form)
        types[name] = type_
    if len(inputs) > 1:
        _check_second(form, inputs, dims)
    if isinstance(dims.target, Weight | Vector):
        types.setdefault("w" if isinstance(dims.target, Weight) else "b", types[OUT])
    numbers: dict[str, Number] = {}
    place = Place(form, numbers, types, inputs)
    for param in form.params:
        value = args.get(param.name)
        if param.name in inputs:
            continue
        if isinstance(value, bool | int | float | str):
            numbers[param.name] = value
        elif param.default is not None:
            numbers[param.name] = place.number(param.default)
    return place.read()
