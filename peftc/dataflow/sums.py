"""The terms of a sum: of `x + y`, and of operations that add to a tensor in other ways.

`x.index_add(1, i, y)` and `x.scatter_add(1, i, y)` add y at some entries, `x - y` takes it away,
`torch.addcmul(x, y, w)` adds y * w, and `x.lerp(y, w)` puts w * (y - x) to x.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from torch import fx

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import reaches

SUMS = frozenset({Op.ADD, Op.BLEND, Op.ACCUMULATE})


def operands_of_sum(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum, or the ends of an interpolation, without factors that are numbers; the
    minuend of a difference and what it takes away. `torch.addcmul` has a term and both factors of
    the other.
    """
    # Seen in: no transformers model, but nViT (`x.lerp(h, a)`), mixtures of depths (`index_add`)
    name = name_of(node)
    if op_of(node) is Op.ACCUMULATE:
        operands = [operand_of(node, 0, "input"), operand_of(node, 3, "source", "src")]
    elif name in ("addcmul", "addcdiv"):
        operands = [operand_of(node, 0, "input"), operand_of(node, 1, "tensor1"), operand_of(node, 2, "tensor2")]
    else:
        operands = [*node.args[:2]][:: -1 if name == "rsub" else 1]
    return [operand for operand in operands if isinstance(operand, fx.Node)]


def is_residual_sum(node: fx.Node) -> bool:
    """Whether a node is the sum of a value and what depends on it."""
    terms = operands_of_sum(node) if op_of(node) is Op.ADD else []
    return any(reaches(one, other) for one, other in permutations(terms, 2))


def differences(layer: LayerGraph, sums: Sequence[fx.Node]) -> list[fx.Node]:
    """The differences `x - y` that may take a value away from the residual stream: not where a
    later sum adds to x, as in `x + f(x - attention)`.
    """
    # Seen in: no transformers model, but the offset attention of PCT
    latest: dict[fx.Node, fx.Node] = {}  # of the sums of an operand
    for add in sums:
        latest |= {layer.stripped(operand): add for operand in operands_of_sum(add)}
    subtractions = [node for node in layer.graph.nodes if layer.op(node) is Op.SUB and is_tensor(node)]
    minuends = [(node, operands_of_sum(node)[:1]) for node in subtractions]
    return [node for node, first in minuends if not any(node < latest.get(layer.stripped(x), node) for x in first)]


def operand_of(node: fx.Node, position: int, *names: str) -> Any:
    """An argument of a call, by its position or one of its names; None without."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
