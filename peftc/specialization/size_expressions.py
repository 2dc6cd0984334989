"""Sizes inside a region as expressions of its arguments, so that guards can test them ahead."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from peftc.dataflow.features import dim_before
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import ancestors, example, is_tensor
from peftc.dataflow.operations import Op, has_side_effects, is_size, op_of
from peftc.dataflow.values import cache_update

SAME_SIZE_MODULES = (nn.Dropout, nn.Identity, nn.LayerNorm)

Create = Callable[[Any, tuple[Any, ...]], fx.Node]


class InputSizes:
    """Rebuilds numbers of a graph from its arguments alone. `create` makes nodes."""

    def __init__(self, root: nn.Module, create: Create) -> None:
        self.root, self.create = root, create

    def rebuild(self, value: Any) -> Any:
        """A node or number equal to `value` that depends on no side effect; None if none is."""
        if not isinstance(value, fx.Node) or not any(map(has_side_effects, ancestors(value))):
            return value
        if is_size(value) and len(value.args) == 2 and isinstance(value.args[1], int):
            source = value.args[0]
            assert isinstance(source, fx.Node)
            return self.size(source, value.args[1])
        numbers = all(isinstance(example(a), (int, float)) for a in (value, *value.args))
        if numbers and getattr(value.target, "__module__", "") == "_operator":
            args = [self.rebuild(a) for a in value.args]
            return None if any(a is None for a in args) else self.node(value.target, tuple(args), value)
        return None

    def size(self, tensor: fx.Node, at: int) -> Any:
        """The same of the size of a tensor in one dimension."""
        at %= tensor.meta["example"].ndim
        if not any(map(has_side_effects, ancestors(tensor))):
            return self.node("size", (tensor, at), tensor.meta["example"].shape[at])
        source = tensor.args[0] if tensor.args else None
        if not isinstance(source, fx.Node):
            return None
        if (update := cache_update(tensor)) is not None:  # a cache adds tokens
            return None if at == tensor.meta["example"].ndim - 2 else self.size(update, at)
        if op_of(tensor) is Op.PERMUTE:
            before = dim_before(tensor, source, at)
            return None if before is None else self.size(source, before)
        if tensor.op == "call_method" and tensor.target in ("view", "reshape"):
            sizes = tensor.args[1:]
            plain = len(sizes) == tensor.meta["example"].ndim and sizes[at] != -1
            return self.rebuild(sizes[at]) if plain else None
        if tensor.target is operator.getitem and source.target == "split":
            return self.part(tensor, source, at)
        if self.same_size(tensor, at):
            return self.size(source, at)
        return self.features(tensor) if at == tensor.meta["example"].ndim - 1 else None

    def part(self, tensor: fx.Node, split: fx.Node, at: int) -> Any:
        """The size of one of the equal parts that a tensor is split into."""
        source, each, *dims = split.args
        assert isinstance(source, fx.Node)
        dim: Any = split.kwargs.get("dim", dims[0] if dims else 0)
        shape = tensor.meta["example"].shape
        if dim % len(shape) != at:
            return self.size(source, at)
        number = each.meta["example"] if isinstance(each, fx.Node) else each
        return self.rebuild(each) if number == shape[at] else None

    def features(self, tensor: fx.Node) -> Any:
        """The output features of a Linear: a size of its weight."""
        if not LayerGraph(tensor.graph, self.root).is_linear(tensor):
            return None
        width = tensor.meta["example"].shape[-1]
        name = f"{tensor.target}.weight"
        weight = self.root.get_parameter(name)
        plain = isinstance(self.root.get_submodule(str(tensor.target)), nn.Linear)
        sides = [0] if plain else [i for i in (0, 1) if weight.shape[i] == width]
        return self.node("size", (self.node(name, (), weight), sides[-1]), width) if sides else None

    def same_size(self, tensor: fx.Node, at: int) -> bool:
        """Whether the result has the size of its first argument."""
        if tensor.op != "call_module":
            by_element = op_of(tensor) in (Op.ADD, Op.SUB, Op.MUL, Op.DIV)
            return op_of(tensor) is Op.CAST or (
                by_element and is_tensor(tensor.args[0]) and not is_tensor(tensor.args[1])
            )
        module = self.root.get_submodule(str(tensor.target))
        last = at == tensor.meta["example"].ndim - 1
        return isinstance(module, SAME_SIZE_MODULES) or (isinstance(module, nn.Linear) and not last)

    def node(self, target: Any, args: tuple[Any, ...], like: Any) -> fx.Node:
        node = self.create(target, args)
        node.meta["example"] = like.meta["example"] if isinstance(like, fx.Node) else like
        return node
