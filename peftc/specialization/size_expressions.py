"""Sizes inside a region as expressions of its arguments, so that what code decides on them can be asked beforehand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from peftc.recognition.graph.dataflow import cache_update
from peftc.recognition.graph.layer_graph import LayerGraph
from peftc.recognition.graph.nodes import ancestors, is_tensor
from peftc.recognition.graph.operations import has_side_effects, is_size

KEEPING = frozenset({"to", "type", "type_as", "contiguous", "float", "clone"})
LAID_OUT = frozenset({"view", "reshape"})
BY_ELEMENT = (operator.mul, operator.add, operator.sub, operator.truediv, torch.mul, torch.add, torch.sub, torch.div)
ON_NUMBERS = frozenset(
    getattr(operator, n)
    for n in ["add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "eq", "ne", "lt", "le", "gt", "ge"]
    + ["and_", "or_", "not_"]
)
TURNED = frozenset({"permute", "transpose", "swapaxes"})
KEEPING_MODULES = (nn.Dropout, nn.Identity, nn.LayerNorm)

Create = Callable[[Any, tuple[Any, ...]], fx.Node]


class Sizes:
    """Rebuilds nodes of a graph that is being traced. `create` makes a node: of a function, of the method of a name, or
    without arguments of the parameter of a name.
    """

    def __init__(self, root: nn.Module, create: Create) -> None:
        self.root, self.create = root, create

    def beforehand(self, value: Any) -> Any:
        """A node with the value of a number in the graph that needs nothing to have run; None where there is none."""
        if not isinstance(value, fx.Node) or not any(map(has_side_effects, ancestors(value))):
            return value
        if is_size(value) and len(value.args) == 2 and isinstance(value.args[1], int):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.size(source, value.args[1])
        if value.op == "call_function" and value.target in ON_NUMBERS:
            args = [self.beforehand(a) for a in value.args]
            return None if any(a is None for a in args) else self.made(value.target, tuple(args), value)
        return None

    def size(self, tensor: fx.Node, at: int) -> Any:
        """The size of a tensor in one dimension, likewise."""
        at %= tensor.meta["example"].ndim
        if not any(map(has_side_effects, ancestors(tensor))):
            return self.made("size", (tensor, at), tensor.meta["example"].shape[at])
        source = tensor.args[0] if tensor.args else None
        if not isinstance(source, fx.Node):
            return None
        if (update := cache_update(tensor)) is not None:  # a cache adds tokens
            return None if at == tensor.meta["example"].ndim - 2 else self.size(update, at)
        if tensor.op == "call_method" and tensor.target in TURNED:
            return self.size(source, turned(tensor)[at])
        if tensor.op == "call_method" and tensor.target in LAID_OUT:
            sizes = tensor.args[1:]
            plain = len(sizes) == tensor.meta["example"].ndim and sizes[at] != -1
            return self.beforehand(sizes[at]) if plain else None
        if tensor.target is operator.getitem and source.target == "split":
            return self.piece(tensor, source, at)
        if self.keeps(tensor, at):
            return self.size(source, at)
        return self.features(tensor) if at == tensor.meta["example"].ndim - 1 else None

    def piece(self, tensor: fx.Node, split: fx.Node, at: int) -> Any:
        """The size of one of the equal pieces that a tensor is split into."""
        source, each, *dims = split.args
        assert isinstance(source, fx.Node)
        dim: Any = split.kwargs.get("dim", dims[0] if dims else 0)
        shape = tensor.meta["example"].shape
        if dim % len(shape) != at:
            return self.size(source, at)
        number = each.meta["example"] if isinstance(each, fx.Node) else each
        return self.beforehand(each) if number == shape[at] else None

    def features(self, tensor: fx.Node) -> Any:
        """How many a Linear gives: a size of its weight."""
        if not LayerGraph(tensor.graph, self.root).is_linear(tensor):
            return None
        width = tensor.meta["example"].shape[-1]
        name = f"{tensor.target}.weight"
        weight = self.root.get_parameter(name)
        plain = isinstance(self.root.get_submodule(str(tensor.target)), nn.Linear)
        sides = [0] if plain else [i for i in (0, 1) if weight.shape[i] == width]
        return self.made("size", (self.made(name, (), weight), sides[-1]), width) if sides else None

    def keeps(self, tensor: fx.Node, at: int) -> bool:
        """Whether the result has the size of the first argument."""
        if tensor.op == "call_method":
            return tensor.target in KEEPING
        if tensor.op == "call_function":
            return tensor.target in BY_ELEMENT and is_tensor(tensor.args[0]) and not is_tensor(tensor.args[1])
        if tensor.op != "call_module":
            return False
        module = self.root.get_submodule(str(tensor.target))
        last = at == tensor.meta["example"].ndim - 1
        return isinstance(module, KEEPING_MODULES) or (isinstance(module, nn.Linear) and not last)

    def made(self, target: Any, args: tuple[Any, ...], like: Any) -> fx.Node:
        node = self.create(target, args)
        node.meta["example"] = like.meta["example"] if isinstance(like, fx.Node) else like
        return node


def turned(tensor: fx.Node) -> list[int]:
    """Which dimension of what was permuted each dimension is."""
    places: list[int] = list(range(tensor.meta["example"].ndim))
    given: Any = tensor.args[1:]
    if tensor.target != "permute":
        one, other = given
        places[one], places[other] = places[other], places[one]
        return places
    return [places[d] for d in (given if isinstance(given[0], int) else given[0])]
