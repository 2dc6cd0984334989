"""From the equation of a form at a place to torch code.

The same operations stand in the code of an edited model, which reads the parameters from the
module of the form, and in the forward of that module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from peftc.equation_code import attention, functions, transforms
from peftc.equations.analysis import Place
from peftc.equations.matrices import DECOMPOSED, DECOMPOSITIONS
from peftc.equations.primitives import FUNCTIONS, OPERATORS
from peftc.equations.rules import Primitive
from peftc.equations.values import Type, Value
from peftc.equations.words import ATTENTION, BELOW, HISTORY, KEPT, MEANS, NONE, POSITIONS, PRUNED, mean_over
from peftc.syntax import ast
from peftc.syntax.walk import children

VALUE = "f"  # the name of a value without one
SEQUENCE = "sequence"  # the attribute of a module with the positions of tokens
CACHE_NAME = "_cache_name"  # the attribute of a module under which a cache has its keys and values
ROUTE = "route"  # the attribute of a module with its random numbers
SIZE = "size"  # in a node's meta: the size of a tensor that is the same for all tokens
VARIABLE = "variable"  # in a node's meta: the name of its value in the text of the form
Operation = fx.Node | float | int | bool | str | tuple[Any, Any]  # two of keys and values
Emit = Callable[..., fx.Node]  # adds the call of a function with arguments to a graph
Forward = Callable[..., Tensor]


@cache
def function_named(name: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    module, _, attribute = name.rpartition(".")
    if module == "torch.Tensor":
        return getattr(Tensor, attribute)
    return cast(Callable[..., Any], getattr(import_module(module), attribute))


def emit_into(graph: fx.Graph) -> Emit:
    """Adds operations at the end of a graph."""
    return lambda function, *args: graph.call_function(function, args)


class Code:
    """Adds the operations of an equation to a graph.

    Args:
        emit: adds an operation.
        inputs: the nodes of the inputs, by name.
        parameter: gives the node of a parameter.
        training: whether dropout acts.
        linear: computes x Wᵀ + b.
        attribute: gives the node of an attribute of the module of the form.

    Attributes:
        below: the nodes of what sites below have of `below(s, first)` and `history(x)`; without
            them this is the first site.
    """

    def __init__(
        self,
        place: Place,
        emit: Emit,
        inputs: Mapping[str, fx.Node],
        parameter: Callable[[str], fx.Node],
        training: Operation = False,
        linear: Callable[..., Tensor] = F.linear,
        attribute: Callable[[str], fx.Node] | None = None,
    ) -> None:
        self.place, self.emit, self.inputs, self.parameter = place, emit, inputs, parameter
        self.attribute = attribute
        self.below: Mapping[ast.Call, fx.Node] = {}
        self.random_nodes: dict[str, fx.Node] = {}
        self.training, self.linear = training, linear
        self.nodes: dict[int, Operation] = {}
        self.decompositions: dict[tuple[Any, ...], fx.Node] = {}

    @cached_property
    def frozen(self) -> Code:
        """The code of expressions through which no gradient flows."""
        return FrozenCode(self)

    def value(self) -> Operation:
        """The node of the value of the form."""
        factor, node = self.place.product
        return self.scaled(node, factor)

    def product(self) -> tuple[Operation, float]:
        """The node of an expression, and the number that it has to be multiplied by."""
        factor, node = self.place.product
        return self.operation(node), factor

    def scaled(self, node: ast.Expr, factor: float) -> Operation:
        """An expression times a number, which multiplies a product where it is thinnest."""
        if factor == 1:
            return self.operation(node)
        is_new = id(node) not in self.nodes
        if isinstance(node, ast.Binary) and node.op == "@" and is_new and self._width(node.right) < self._entries(node):
            return self._matmul(node.left, node.right, self.scaled(node.right, factor))
        return self.emit(function_named(OPERATORS["*"].torch), self.operation(node), factor)

    def _width(self, node: ast.Expr) -> float:
        """The fewest entries of a product and of its last operands."""
        own = self._entries(node)
        return min(own, self._width(node.right)) if isinstance(node, ast.Binary) and node.op == "@" else own

    def _entries(self, node: ast.Expr) -> float:
        """The entries of a value for one token, by which a number can multiply it: not ids."""
        type_ = self.place.type_of(node)
        return math.inf if type_.batch == "ids" else type_.entries

    def operation(self, node: ast.Expr) -> Operation:
        operand = self.place.operand(node)
        if not isinstance(operand, Value):
            return operand
        if id(node) not in self.nodes:
            self.nodes[id(node)] = self._named(self._operation(node), node)
        return self.nodes[id(node)]

    def _named(self, operation: Operation, node: ast.Expr) -> Operation:
        """An operation with the name that the text has for its value."""
        name = self.place.products.names.get(id(node), VALUE)
        if isinstance(operation, fx.Node) and operation.op == "call_function" and operation.target is not getattr:
            operation.meta.setdefault(VARIABLE, name)
        operand = self.place.operand(node)
        if isinstance(operation, fx.Node) and isinstance(operand, Value) and not operand.type.batch:
            operation.meta.setdefault(SIZE, operand.type.size)
        return operation

    def _operation(self, node: ast.Expr) -> Operation:
        place = self.place
        match node:
            case ast.Name(name) if name in self.inputs:
                return self.inputs[name]
            case ast.Name(name) if name in place.sizes:
                return self.parameter(name)
            case ast.Name(name):
                return self.operation(place.products.lets.get(name) or place.lets[name])
            case ast.Negative(value):
                return self.emit(torch.neg, self.operation(value))
            case ast.Binary("@", left, right) if self._is_times_blocks(left, right):
                return self.emit(functions.times_blocks, self.operation(left), self._blocks(right))
            case ast.Binary("@", left, right):
                return self._matmul(left, right, self.operation(right))
            case ast.Binary("+" | "-" as op, left, right):
                return self._sum(op, left, right)
            case ast.Binary("*", ast.Number() as number, right):
                return self.scaled(right, float(place.number(number)))
            case ast.Binary(op, left, right):
                a, b = self.operation(left), self.operation(right)
                if not isinstance(b, fx.Node) and b == 1:
                    return a
                return self.emit(function_named(OPERATORS[op].torch), a, b)
            case ast.Call("below" | "history"):
                return self._of_layers(node)
            case ast.Call(function, args):
                over = mean_over(node)
                own = MEANS[over] if over else place.function(function)
                return self._call(FUNCTIONS[own], args[:1] if over else args)
            case ast.Attribute(ast.Call(function, args), part):
                return self._part(function, tuple(map(self.operation, args)), part)
            case ast.Pair(keys, values):
                return self.operation(keys), self.operation(values)
            case ast.Item(value, (index, *_)) if name := place.random_index(index):
                return self._random_item(self.operation(value), name)
            case ast.Item(value, indices):
                numbers: tuple[Any, ...] = tuple(map(place.number, indices))
                type_ = place.type_of(value)
                if type_.batch:  # one feature has a dimension
                    size, (*outer, last) = len(type_.size), numbers
                    is_whole = len(numbers) < size
                    ends = [slice(None)] * (size - len(numbers)) if is_whole else [slice(last, last + 1)]
                    numbers = (..., *(numbers if is_whole else outer), *ends)
                return self.emit(function_named("operator.getitem"), self.operation(value), numbers)
            case _:
                raise TypeError(f"{type(node).__name__} is no part of an equation")

    def _of_layers(self, call: ast.Call) -> Operation:
        """The value at the site below, or those up to here."""
        below, part = self.below.get(call), self.place.products.whole(call.args[call.function == BELOW])
        if call.function == HISTORY:
            return self.emit(functions.history, () if below is None else below, self.operation(part))
        if below is not None:
            return below
        first, own, type_ = self.operation(part), self.place.operand(part), self.place.type_of(call)
        if isinstance(own, Value) and own.type == type_:
            return first
        name, like = next(iter(self.inputs.items()))
        dimensions = 0 if self.place.types[name].batch == "ids" else len(self.place.types[name].size)
        return self.emit(functions.for_tokens, first, like, dimensions, type_.size)

    def _random_item(self, parts: Operation, name: str) -> Operation:
        """The part of a random number while training; otherwise the mean of all."""
        if self.training is False:
            return self.emit(functions.mean_of_parts, parts)
        if name not in self.random_nodes:
            assert self.attribute is not None
            at, count = self.place.random_numbers.index(name), self.place.random_count(name)
            node = self.emit(functions.random_number, self.attribute(ROUTE), at, count, self.training)
            node.meta[VARIABLE] = name
            self.random_nodes[name] = node
        return self.emit(functions.random_part, parts, self.random_nodes[name], self.training)

    def _part(self, function: str, operands: tuple[Operation, ...], part: str) -> Operation:
        """A part of a decomposition, which is computed once for all of its parts."""
        key = function, *operands
        if key not in self.decompositions:
            primitive = DECOMPOSITIONS[f"{function}.{part}"]
            self.decompositions[key] = self.emit(function_named(primitive.torch), *operands)
        index = DECOMPOSED[function].index(part)
        return self.emit(function_named("operator.getitem"), self.decompositions[key], index)

    def _matmul(self, left: ast.Expr, right: ast.Expr, b: Operation, bias: Operation | None = None) -> Operation:
        """A product. Args: `b`: the node of the right operand, which may have a factor."""
        type_ = self.place.type_of(right)
        if self._is_structured_sum(left) and type_.batch == "tokens" and len(type_.size) == 1:
            assert isinstance(left, ast.Binary)
            parts = (self._matmul(part, right, b) for part in (left.left, left.right))
            return self.emit(function_named(OPERATORS[left.op].torch), *parts)
        if _is_call(left, "kron") and type_.batch == "tokens" and len(type_.size) == 1:
            outer, inner = children(left)
            return self.emit(functions.kron_map, b, self.operation(outer), self.operation(inner))
        if _is_call(left, "circulant") and type_.batch == "tokens" and len(type_.size) == 1:
            return self.emit(functions.circulant_map, b, self.operation(children(left)[0]))
        if self._has_blocks(left) and type_.batch == "tokens" and len(type_.size) == 1:
            return self.emit(functions.block_map, b, self._blocks(left))
        a = self.operation(left)
        if self.place.type_of(left).batch:
            return self.emit(functions.token_matrices, a, b)
        if type_.batch == "ids":
            p = self._dropout_of_ids(right)
            return self.emit(functions.lookup, b, a, *((p, self.training) if p else ()))
        if type_.batch and len(self.place.type_of(left).size) == 3:
            return self.emit(functions.head_maps, b, a)
        if type_.batch:
            return self.emit(self.linear, b, a, *(() if bias is None else (bias,)))
        return self.emit(torch.matmul, a, b)

    def _is_structured(self, matrix: ast.Expr) -> bool:
        """Whether a matrix maps tokens in fewer operations than a product with its entries."""
        return _is_call(matrix, "kron") or _is_call(matrix, "circulant") or self._has_blocks(matrix)

    def _is_structured_sum(self, matrix: ast.Expr) -> bool:
        if not isinstance(matrix, ast.Binary) or matrix.op not in "+-" or id(matrix) in self.nodes:
            return False
        parts = matrix.left, matrix.right
        return all(self._is_structured(part) or self._is_structured_sum(part) for part in parts)

    def _is_times_blocks(self, left: ast.Expr, right: ast.Expr) -> bool:
        """Whether a product is that of a matrix with one that has blocks on its diagonal."""
        return self._has_blocks(right) and not self._has_blocks(left) and len(self.place.type_of(left).size) == 2

    def _has_blocks(self, node: ast.Expr) -> bool:
        """Whether a matrix has blocks on its diagonal and nothing else, and is not formed yet."""
        inner = children(node)[0] if _is_call(node, "t") else node
        return _is_call(inner, "blocks") and id(node) not in self.nodes

    def _blocks(self, node: ast.Expr) -> Operation:
        """The blocks of such a matrix."""
        inner = children(node)[0]
        return (
            self.emit(functions.t, self.operation(children(inner)[0])) if _is_call(node, "t") else self.operation(inner)
        )

    def _sum(self, op: str, left: ast.Expr, right: ast.Expr) -> Operation:
        first, second = self.place.operand(left), self.place.operand(right)
        if not isinstance(second, Value) and second == 0:
            return self.operation(left)
        if not isinstance(first, Value) and first == 0 and op == "+":
            return self.operation(right)
        if op == "+" and self._is_map_with_bias(left, right):
            return self._map(left, right)
        if op == "+" and self._is_map_with_bias(right, left):
            return self._map(right, left)
        return self.emit(function_named(OPERATORS[op].torch), self.operation(left), self.operation(right))

    def _is_map_with_bias(self, product: ast.Expr, bias: ast.Expr) -> bool:
        """Whether a sum is that of a matrix times each token, and a vector of biases."""
        if not (isinstance(product, ast.Binary) and product.op == "@") or id(product) in self.nodes:
            return False
        if self._is_structured(product.left) or self._is_structured_sum(product.left):
            return False
        if self.place.type_of(product.left).batch:
            return False
        operand, source = self.place.operand(bias), self.place.type_of(product.right)
        size = self.place.type_of(product.left).size
        is_vector = isinstance(operand, Value) and operand.type == Type(size[:1]) and len(size) == 2
        return is_vector and bool(source.batch) and source.batch != "ids"

    def _map(self, product: ast.Expr, bias: ast.Expr) -> Operation:
        assert isinstance(product, ast.Binary)
        return self._matmul(product.left, product.right, self.operation(product.right), self.operation(bias))

    def _dropout_of_ids(self, node: ast.Expr) -> float:
        """The probability that the one entry of a one-hot vector is zero."""
        match node:
            case ast.Name(name) if name in self.place.lets:
                return self._dropout_of_ids(self.place.lets[name])
            case ast.Call(_, (value, p)):
                return 1 - (1 - self._dropout_of_ids(value)) * (1 - float(self.place.number(p)))
            case _:
                return 0.0

    def _positions(self, value: ast.Expr, ends: Sequence[ast.Expr]) -> Operation:
        at = [None if end == NONE else end for end in map(self.place.argument, ends)]
        if all(end is None for end in at):
            return self.operation(value)
        assert self.attribute is not None
        return self.emit(functions.at_positions, self.operation(value), self.attribute(SEQUENCE), *at)

    def _call(self, primitive: Primitive, args: Sequence[ast.Expr]) -> Operation:
        if primitive.name == POSITIONS:
            return self._positions(args[0], args[1:])
        if primitive.name == ATTENTION:
            assert self.attribute is not None
            of_site = self.attribute(SEQUENCE), self.attribute(CACHE_NAME)
            return self.emit(attention.attention_with_past, *map(self.operation, args), *of_site)
        if primitive.name == "frozen" and isinstance(args[0], ast.Call | ast.Binary | ast.Negative):
            return self.frozen.operation(args[0])
        if not primitive.torch:
            return self.operation(args[0])
        operations = tuple(map(self.operation, args))
        match primitive.name:
            case "token_mean" | "batch_mean":
                function = function_named(primitive.torch)
                return self.emit(function, operations[0], len(self.place.type_of(args[0]).size))
            case "reshape" if self.place.type_of(args[0]).batch:
                return self.emit(
                    functions.reshape_features, operations[0], len(self.place.type_of(args[0]).size), operations[1:]
                )
            case "narrow" if self.place.type_of(args[0]).batch:
                return self.emit(transforms.narrow_features, *operations)
            case "logistic_noise":
                value = operations[0]
                return value if self.training is False else self.emit(functions.logistic_noise, value, self.training)
            case "normal_noise":
                value, deviation = operations
                is_active = self.training is not False
                return self.emit(functions.normal_noise, value, deviation, self.training) if is_active else value
            case "pruned":
                states = self.parameter(KEPT), self.parameter(PRUNED)
                return self.emit(functions.pruned, *operations[:2], *states)
            case "dropout":
                value, p = operations
                is_active = self.training is not False and p != 0 and self.place.type_of(args[0]).batch != "ids"
                return self.emit(functions.dropout, value, p, self.training) if is_active else value
            case _:
                return self.emit(function_named(primitive.torch), *operations)


class FrozenCode(Code):
    """The operations of an expression through which no gradient flows: its operands have none, so
    that autograd keeps nothing of them.
    """

    def __init__(self, code: Code) -> None:
        super().__init__(code.place, code.emit, {}, code.parameter, code.training, code.linear, code.attribute)
        self.code, self.random_nodes, self.below = code, code.random_nodes, code.below

    def _operation(self, node: ast.Expr) -> Operation:
        is_leaf = isinstance(node, ast.Name) and node.id not in self.place.lets
        is_leaf |= isinstance(node, ast.Call) and node.function in (BELOW, HISTORY)
        if is_leaf or (isinstance(node, ast.Name) and node.id in self.place.products.lets):
            return self.emit(function_named(FUNCTIONS["frozen"].torch), self.code.operation(node))
        return super()._operation(node)


def _is_call(node: ast.Expr, function: str) -> bool:
    return isinstance(node, ast.Call) and node.function == function


def evaluate(place: Place, node: ast.Expr, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a part of an equation, in evaluation."""
    (value,) = evaluate_all(place, (node,), inputs, parameters)
    return value


def evaluate_all(
    place: Place, parts: Sequence[ast.Expr], inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> list[Tensor]:
    """The tensors of parts of an equation, in evaluation."""
    graph = fx.Graph()
    # By numbers: fx takes names that differ in case alone for one.
    nodes = {name: graph.placeholder(f"operand_{i}") for i, name in enumerate((*inputs, *parameters))}
    code = Code(place, emit_into(graph), {n: nodes[n] for n in inputs}, nodes.__getitem__)
    graph.output(tuple(map(code.operation, parts)))
    results = fx.GraphModule({}, graph)(*inputs.values(), *parameters.values())
    return [value if isinstance(value, Tensor) else torch.tensor(value) for value in results]
