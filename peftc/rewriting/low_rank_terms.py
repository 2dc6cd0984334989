"""A Linear with a low-rank term of its input is computed as one, for one backward of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from peftc.equation_code.code import VARIABLE
from peftc.equation_code.functions import add_to, cast_like
from peftc.rewriting.boundary import base_call
from peftc.rewriting.edits import EQUATIONS
from peftc.rewriting.node_builder import NodeBuilder
from peftc.runtime.low_rank import low_rank_linear


def join_low_rank_terms(graph: fx.Graph, numbers: Iterator[int]) -> None:
    """Rewrites `Linear.forward(x) + factor · x Aᵀ Bᵀ` as `low_rank_linear`."""
    for node in list(graph.nodes):
        if node.target is not add_to:
            continue
        base, term, *factor = node.args
        if not _is_linear(base) or len(base.users) > 1 or (factors := _low_rank(term, base.args[1])) is None:
            continue
        builder = NodeBuilder(graph, numbers)
        builder.start_before(node)
        weight, bias = (builder.add(graph.get_attr(name)) for name in ("weight", "bias"))
        new = builder.function(low_rank_linear, base.args[1], weight, bias, *factors, *factor)
        new.meta |= {VARIABLE: "result", EQUATIONS: node.meta.get(EQUATIONS, ())}
        node.replace_all_uses_with(new)
        unused: list[Any] = [node, term, term.args[0], term.args[0].args[0], base]
        for one in unused:
            if isinstance(one, fx.Node) and not one.users and one.op == "call_function":
                graph.erase_node(one)


def _is_linear(node: Any) -> bool:
    """Whether a node is the call of the forward of nn.Linear itself."""
    is_call = isinstance(node, fx.Node) and node.target is base_call and not node.kwargs
    return is_call and node.args[0] is nn.Linear and len(node.args) == 2


def _low_rank(node: Any, x: Any) -> tuple[Any, Any] | None:
    """A and B of x Aᵀ Bᵀ."""
    inner = _product(node)
    first = None if inner is None else _product(inner[0])
    if inner is None or first is None or len(inner[0].users) > 1 or len(node.users) > 1:
        return None
    source = first[0]
    while isinstance(source, fx.Node) and source.target is cast_like:
        source = source.args[0]
    return (first[1], inner[1]) if source is x else None


def _product(node: Any) -> tuple[Any, Any] | None:
    """Tokens and matrix of a product without a bias."""
    is_product = isinstance(node, fx.Node) and node.target is F.linear and len(node.args) == 2 and not node.kwargs
    return (node.args[0], node.args[1]) if is_product else None
