"""The router of experts: the product whose result decides which experts a token goes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.operations import Op, name_of, op_of
from peftc.dataflow.values import upstream, value_users


@dataclass(frozen=True, eq=False)
class Router:
    """The node of the logits, what it reads, and the parameters by their names in the layer.
    `inside_leaf`: these nodes are in a module that could not be traced, not in the layer's graph.
    """

    logits: fx.Node
    x: fx.Node
    weight: str
    bias: str | None = None
    inside_leaf: bool = False


def find_router(inputs: Iterable[fx.Node], count: int, body: set[fx.Node], layer: LayerGraph) -> Router | None:
    """The router: the nearest product upstream of the inputs of `count` experts that has a value for
    each and reaches them by a choice among its values.
    """
    nodes = (n for node in inputs for n in upstream(node, lambda n: n not in body))
    routers = [r for n in nodes if (r := _router_at(n, layer))]
    wide = [r for r in routers if shape(r.logits)[-1] >= count and _is_chosen_from(r.logits, body)]
    return max(wide, key=lambda r: r.logits) if wide else None


def _router_at(node: fx.Node, layer: LayerGraph) -> Router | None:
    """A product with one matrix, by a Linear or by `F.linear`."""
    x = first_input(node)
    if x is None or not is_tensor(node) or layer.op(node) is not Op.LINEAR:
        return None
    if node.op == "call_module":
        has_bias = getattr(layer.module(node), "bias", None) is not None
        return Router(node, x, f"{node.target}.weight", f"{node.target}.bias" if has_bias else None)
    operands = [*node.args[1:], *node.kwargs.values()]
    names = [_parameter(value) for value in operands if isinstance(value, fx.Node)]
    return Router(node, x, names[0], names[1] if len(names) > 1 else None) if names and names[0] else None


def _parameter(node: fx.Node) -> str | None:
    """The name of the parameter that a value is, but for its dtype and layout."""
    while (op_of(node) is Op.CAST or name_of(node) == "t") and (source := first_input(node)) is not None:
        node = source
    return str(node.target) if node.op == "get_attr" and isinstance(example(node), nn.Parameter) else None


def _is_chosen_from(logits: fx.Node, body: set[fx.Node]) -> bool:
    """Whether some of the values are chosen by their order."""
    seen, stack = {logits}, [logits]
    while stack:
        users = value_users(stack.pop())
        if any(op_of(user) is Op.CHOICE or name_of(user) == "gather" for user in users):
            return True
        stack += [user for user in users if user in body and user not in seen]
        seen.update(users)
    return False
