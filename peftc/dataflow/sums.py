"""The terms of a sum: of `x + y`, and of operations that add to a tensor in other ways.

`x.index_add(1, i, y)` and `x.scatter_add(1, i, y)` add y at some entries, `x - y` takes it away,
`torch.addcmul(x, y, w)` adds y * w, and `x.lerp(y, w)` puts w * (y - x) to x.
"""

from typing import Any

from torch import fx

from peftc.dataflow.operations import Op, name_of, op_of

SUMS = frozenset({Op.ADD, Op.BLEND, Op.ACCUMULATE})


def operands_of_sum(node: fx.Node) -> list[fx.Node]:
    """The terms of a sum, or the ends of an interpolation, without factors that are numbers; the
    minuend of a difference and what it takes away. `torch.addcmul` has a term and both factors of
    the other.
    """
    # Seen in: no transformers model, but nViT (`x.lerp(h, a)`), mixtures of depths (`index_add`)
    name = name_of(node)
    if op_of(node) is Op.ACCUMULATE:
        operands = [_operand(node, 0, "input"), _operand(node, 3, "source", "src")]
    elif name in ("addcmul", "addcdiv"):
        operands = [_operand(node, 0, "input"), _operand(node, 1, "tensor1"), _operand(node, 2, "tensor2")]
    else:
        operands = [*node.args[:2]][:: -1 if name == "rsub" else 1]
    return [operand for operand in operands if isinstance(operand, fx.Node)]


def _operand(node: fx.Node, position: int, *names: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
