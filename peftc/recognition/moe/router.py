"""The router of experts: the product whose result decides which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import value_users

_CHOOSES = frozenset({"topk", "sort", "argsort", "argmax", "max", "one_hot", "scatter", "scatter_", "gather"})
_CASTS = frozenset({"to", "float", "type", "type_as", "contiguous", "t"})


@dataclass(frozen=True, eq=False)
class Router:
    """`logits`: the node that computes them; `x`: what it reads; `weight`, `bias`: the parameters by their names in the layer.

    `alone`: in a module whose code could not be entered, so that the layer's graph does not have these nodes.
    """

    logits: fx.Node
    x: fx.Node
    weight: str
    bias: str | None = None
    alone: bool = False


def router(called: Iterable[fx.Node], count: int, body: set[fx.Node], root: nn.Module) -> Router | None:
    """The router of `count` experts. `called`: what their module is called with.

    The nearest product upstream that has a value for each expert and reaches the experts by a choice among its values.
    """
    found = [r for node in called for n in nodes.upstream(node, lambda n: outside(n, body)) if (r := routes(n, root))]
    wide = [r for r in found if nodes.shape(r.logits)[-1] >= count and chosen(r.logits, body)]
    return max(wide, key=lambda r: r.logits) if wide else None


def outside(node: fx.Node, body: set[fx.Node]) -> bool:
    return node not in body


def routes(node: fx.Node, root: nn.Module) -> Router | None:
    """A product with one matrix, by a Linear or in the code around it."""
    x = nodes.first_input(node)
    if x is None or not nodes.is_tensor(node):
        return None
    if nodes.is_linear(node, root):
        name = str(node.target)
        biased = getattr(root.get_submodule(name), "bias", None) is not None
        return Router(node, x, f"{name}.weight", f"{name}.bias" if biased else None)
    if node.op != "call_function" or node.target is not nn.functional.linear:
        return None
    given = [*node.args[1:], *node.kwargs.values()]
    names = [parameter(value) for value in given if isinstance(value, fx.Node)]
    return Router(node, x, names[0], names[1] if len(names) > 1 else None) if names and names[0] else None


def parameter(node: fx.Node) -> str | None:
    """The name of the parameter that a value is, but for its dtype."""
    while node.op == "call_method" and node.target in _CASTS and (before := nodes.first_input(node)) is not None:
        node = before
    return str(node.target) if node.op == "get_attr" and isinstance(nodes.example(node), nn.Parameter) else None


def chosen(logits: fx.Node, body: set[fx.Node]) -> bool:
    """Whether some of the values are chosen by what they are."""
    seen, todo = {logits}, [logits]
    while todo:
        for user in value_users(todo.pop()):
            name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
            if name in _CHOOSES:
                return True
            if user in body and user not in seen:
                seen.add(user)
                todo.append(user)
    return False
