"""Nodes of a traced graph and the values that they had in the sample forward."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

EDIT = "<edit>"  # stands for the module in the origin of nodes that edits insert


def example(node: object) -> object:
    """The value that a node had in the sample forward; anything else is its own value."""
    return node.meta.get("example") if isinstance(node, fx.Node) else node


def is_tensor(node: object) -> bool:
    return isinstance(example(node), torch.Tensor)


def shape(node: object) -> tuple[int, ...]:
    """The shape of a tensor, () for anything else."""
    value = example(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def first_input(node: fx.Node) -> fx.Node | None:
    """The first operand; PyTorch's modules name it `input`."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def module_path(node: fx.Node) -> str:
    """The dotted name of the module whose code runs a node."""
    return str(node.meta.get("origin", ("",))[0])


def is_edit(node: fx.Node) -> bool:
    """Whether an edit inserted the node."""
    return module_path(node) == EDIT


def output_of(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op == "output")


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in nested arguments, in order, with repetitions."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)  # pyright: ignore[reportArgumentType]
    return nodes


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """The nodes in nested arguments or results, with the path to each."""
    if isinstance(value, fx.Node):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from parts(item, (*path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, (*path, key))


def ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and everything that it is computed from."""
    nodes, stack = {node}, [node]
    while stack:
        new = set(stack.pop().all_input_nodes) - nodes
        nodes |= new
        stack += new
    return nodes
