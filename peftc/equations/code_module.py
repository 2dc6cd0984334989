"""From an equation at a place to torch code: a graph of primitives, in which parameters are read
from the module that owns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from peftc.equations import functions_module as functions
from peftc.equations.analysis import TOKENS, Place
from peftc.equations.primitives import FUNCTIONS, OPERATORS, Primitive
from peftc.equations.rules import Operand
from peftc.equations.values import Number, Type, Value
from peftc.syntax import ast

Operation = fx.Node | float | int | bool | str
Forward = Callable[..., Tensor]


@cache
def function_named(name: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    module, _, attribute = name.rpartition(".")
    if module == "torch.Tensor":
        return getattr(Tensor, attribute)
    return cast(Callable[..., Any], getattr(import_module(module), attribute))


class Code:
    """Adds the operations of an equation to a graph.

    Args:
        inputs: the nodes of the inputs, by name.
        parameter: gives the node of a parameter.
        training: whether dropout acts.
    """

    def __init__(
        self,
        place: Place,
        graph: fx.Graph,
        inputs: Mapping[str, fx.Node],
        parameter: Callable[[str], fx.Node],
        training: bool,
    ) -> None:
        self.place, self.graph, self.inputs, self.parameter = place, graph, inputs, parameter
        self.training = training
        self.nodes: dict[int, Operation] = {}

    def value(self) -> Operation:
        """The node of the value of the form."""
        assert self.place.result is not None
        return self.operation(self.place.result)

    def operation(self, node: ast.Expr) -> Operation:
        operand = self.place.operand(node)
        if not isinstance(operand, Value):
            return operand
        if id(node) not in self.nodes:
            self.nodes[id(node)] = self._operation(node)
        return self.nodes[id(node)]

    def _operation(self, node: ast.Expr) -> Operation:
        place = self.place
        match node:
            case ast.Name(name) if name in self.inputs:
                return self.inputs[name]
            case ast.Name(name) if name in place.sizes:
                return self.parameter(name)
            case ast.Name(name):
                return self.operation(place.lets[name])
            case ast.Negative(value):
                return self.graph.call_function(torch.neg, (self.operation(value),))
            case ast.Binary(op, left, right):
                return self._binary(op, left, right)
            case ast.Call(function, args):
                is_over_tokens = function == "mean" and len(args) == 2 and args[1] == ast.Name(TOKENS)
                own = "token_mean" if is_over_tokens else place.function(function)
                return self._call(FUNCTIONS[own], args[:1] if is_over_tokens else args)
            case ast.Item(value, indices):
                numbers = tuple(map(place.number, indices))
                return self.graph.call_function(function_named("operator.getitem"), (self.operation(value), numbers))
            case _:
                raise TypeError(f"{type(node).__name__} is no part of an equation")

    def _binary(self, op: str, left: ast.Expr, right: ast.Expr) -> Operation:
        first, second = self.place.operand(left), self.place.operand(right)
        a, b = self.operation(left), self.operation(right)
        if op == "@":
            return self._matmul(second, a, b, right)
        if op in "+-" and _is_number(second, 0):
            return a
        if op == "+" and _is_number(first, 0):
            return b
        if op in "*/" and _is_number(second, 1):
            return a
        if op == "*" and _is_number(first, 1):
            return b
        return self.graph.call_function(function_named(OPERATORS[op].torch), (a, b))

    def _matmul(self, right: Operand, a: Operation, b: Operation, node: ast.Expr) -> Operation:
        assert isinstance(right, Value)
        if right.type.batch == "ids":
            p = self._dropout_of_ids(node) if self.training else 0.0
            return self.graph.call_function(functions.lookup, (b, a, p) if p else (b, a))
        if right.type.batch:
            return self.graph.call_function(F.linear, (b, a))
        return self.graph.call_function(torch.matmul, (a, b))

    def _dropout_of_ids(self, node: ast.Expr) -> float:
        """The probability that the one entry of a one-hot vector is zero."""
        match node:
            case ast.Name(name) if name in self.place.lets:
                return self._dropout_of_ids(self.place.lets[name])
            case ast.Call(_, (value, p)):
                return 1 - (1 - self._dropout_of_ids(value)) * (1 - float(self.place.number(p)))
            case _:
                return 0.0

    def _call(self, primitive: Primitive, args: Sequence[ast.Expr]) -> Operation:
        operations = tuple(map(self.operation, args))
        match primitive.name:
            case "none":
                return operations[0]
            case "token_mean":
                size = self._type(args[0]).size
                return self.graph.call_function(functions.token_mean, (operations[0], len(size)))
            case "dropout":
                value, p = operations
                type_ = self._type(args[0])
                if not self.training or p == 0 or type_.batch == "ids":
                    return value
                return self.graph.call_function(F.dropout, (value, p, True))
            case _:
                return self.graph.call_function(function_named(primitive.torch), operations)

    def _type(self, node: ast.Expr) -> Type:
        operand = self.place.operand(node)
        assert isinstance(operand, Value)
        return operand.type


def _is_number(operand: Operand, number: Number) -> bool:
    return not isinstance(operand, Value) and not isinstance(operand, str) and operand == number


def forward_of(place: Place, owners: tuple[tuple[str, str], ...], training: bool) -> Forward:
    """`forward(self, *inputs)` of a module with the parameters of a form, the same for a place.

    Args: `owners`: parameters with the attribute of the module that has them, if not the module.
    """
    key = owners, training
    if key not in place.code:
        place.code[key] = _forward(place, dict(owners), training)
    return place.code[key]


def evaluate(place: Place, node: ast.Expr, inputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """The tensor of a part of an equation, in evaluation."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in (*inputs, *parameters)}
    value = Code(place, graph, {n: nodes[n] for n in inputs}, nodes.__getitem__, training=False).operation(node)
    graph.output(value)
    result = fx.GraphModule({}, graph)(*inputs.values(), *parameters.values())
    return result if isinstance(result, Tensor) else torch.tensor(result)


def _forward(place: Place, owners: Mapping[str, str], training: bool) -> Forward:
    graph = fx.Graph()
    module = graph.placeholder("self")
    inputs = {name: graph.placeholder(name) for name in place.inputs}
    parameters: dict[str, fx.Node] = {}

    def parameter(name: str) -> fx.Node:
        if name not in parameters:
            path = (owners[name], name) if name in owners else (name,)
            parameters[name] = reduce(lambda node, part: graph.call_function(getattr, (node, part)), path, module)
        return parameters[name]

    value = Code(place, graph, inputs, parameter, training).value()
    graph.output(value)
    code = graph.python_code("self", verbose=False)
    names = dict(code.globals)
    exec(compile(code.src, "<form>", "exec"), names)  # of the graph, not of the text
    return cast(Forward, names["forward"])
