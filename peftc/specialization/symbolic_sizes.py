"""Sizes inside of a region as expressions of the sizes of its arguments, by symbolic shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]
from torch.utils._sympy.functions import (
    CleanDiv,
    FloatPow,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    Mod,
    PowByNatural,
    PythonMod,
    ToFloat,
)

from peftc.dataflow.nodes import ancestors
from peftc.dataflow.operations import Op, op_of

Create = Callable[[Any, tuple[Any, ...], Any], fx.Node]  # of a target, arguments, and an example
BINARY: dict[type[sympy.Basic], Any] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    IntTrueDiv: operator.truediv,
    FloatTrueDiv: operator.truediv,
    sympy.Pow: operator.pow,
    FloatPow: operator.pow,
    PowByNatural: operator.pow,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}


class Unknown(Exception):
    """A number is not an expression of the arguments' sizes, or not in these operations."""


class SymbolicSizes:
    """Runs the part of a graph before a number again, with symbols for the arguments' sizes.

    `pause`: a context in which nothing is recorded.
    """

    def __init__(self, root: nn.Module, create: Create, pause: Callable[[], AbstractContextManager[None]]) -> None:
        self.root, self.create, self.pause = root, create, pause
        self.symbols: dict[sympy.Symbol, tuple[fx.Node, int, int]] = {}

    def rebuild(self, number: fx.Node) -> tuple[Any, list[fx.Node]] | None:
        """A node (or number) equal to `number`, of the arguments alone, and the conditions under
        which it is; None if there is none.
        """
        try:
            with self.pause(), _disable_current_modes():
                value, shapes = self.run(number)
            text = value.node.expr if isinstance(value, torch.SymInt | torch.SymFloat) else value
            conditions = [self.node(guard.expr) for guard in shapes.guards]
            return self.node(text), [c for c in conditions if isinstance(c, fx.Node)]
        except Exception:  # what cannot be computed without data, whatever torch raises for it
            return None

    def run(self, number: fx.Node) -> tuple[Any, ShapeEnv]:
        shapes = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        before = ancestors(number)
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        nodes = [node for node in number.graph.nodes if node in before or node is number]
        values = {node: self.argument(node, mode) for node in nodes if node.op == "placeholder"}
        with mode, torch.no_grad():
            for node in nodes[len(values) :]:
                values[node] = self.value(node, values)
        return values[number], shapes

    def value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            attribute: Any = reduce(getattr, str(node.target).split("."), self.root)
            return _static(attribute) if isinstance(attribute, torch.Tensor) else attribute
        if op_of(node) is Op.CACHE:
            raise Unknown
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self.root.get_submodule(str(node.target))
        tensors = (*module.named_parameters(), *module.named_buffers())
        return functional_call(module, {name: _static(t) for name, t in tensors}, args, kwargs)

    def argument(self, node: fx.Node, mode: FakeTensorMode) -> Any:
        """An argument, each of whose sizes is a symbol."""
        example = node.meta["example"]
        if not isinstance(example, torch.Tensor):
            if example is None or isinstance(example, bool | int | float | str):
                return example
            raise Unknown
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * example.ndim)
        like = torch.empty(tuple(example.shape), dtype=example.dtype, device="meta")
        sizes = mode.from_tensor(like, symbolic_context=context).shape
        for at, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                self.symbols[size.node.expr] = node, at, example.shape[at]
        with mode:
            return torch.empty(sizes, dtype=example.dtype, device=example.device)

    def node(self, text: Any) -> Any:
        """An expression as nodes of the graph. Raises: Unknown."""
        if not isinstance(text, sympy.Basic):
            return text
        if text in (sympy.true, sympy.false):
            return bool(text)
        if isinstance(text, sympy.Integer):
            return int(text)
        if isinstance(text, sympy.Float):
            return float(text)
        if isinstance(text, ToFloat):  # equal numbers
            return self.node(text.args[0])
        if isinstance(text, sympy.Symbol) and text in self.symbols:
            node, at, value = self.symbols[text]
            return self.create("size", (node, at), value)
        if type(text) not in BINARY:
            raise Unknown
        return self.chain(BINARY[type(text)], map(self.node, text.args))

    def chain(self, target: Any, numbers: Iterable[Any]) -> Any:
        """`a * b * c` as nodes of two operands."""

        def step(one: Any, other: Any) -> Any:
            value = target(*(n.meta["example"] if isinstance(n, fx.Node) else n for n in (one, other)))
            are_nodes = isinstance(one, fx.Node) or isinstance(other, fx.Node)
            return self.create(target, (one, other), value) if are_nodes else value

        return reduce(step, numbers)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data, whose sizes are numbers."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
