"""Products of Linears with what edits add to them, computed as one.

An edit of a weight gives `linear(x, s * (w + B @ A))`, with a factor in s for each row. The same is
`s * (linear(x, w) + linear(linear(x, A), B))`: autograd keeps activations, no weight of full size.
A Linear with a low-rank term of its input has one backward of both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from peftc.dataflow.nodes import example, is_edit
from peftc.equation_code.code import SIZE, VARIABLE
from peftc.equation_code.functions import add_to, cast_like
from peftc.rewriting.boundary import base_call
from peftc.rewriting.edits import EQUATIONS
from peftc.rewriting.node_builder import NodeBuilder
from peftc.rewriting.states import PASS
from peftc.runtime.low_rank import low_rank_linear
from peftc.runtime.parameters import full_precision, scaled_product, stored_as

OWN_DTYPE = "own dtype"  # in the meta of an edited weight: whether a form of it asks for a dtype
_THIN = 4  # a product is thin whose inner dimension is so many times smaller than the weight's

Product = tuple[float, fx.Node, fx.Node]  # factor · left @ right


def distribute_products(graph: fx.Graph, numbers: Iterator[int]) -> None:
    """Rewrites the products of tokens with weights that are s ⊙ (w + Σ factor · left @ right).

    A product with a bias stays as it is: torch adds the bias in the product, and the model without
    its edits would not be equal bit for bit. So does one with a form that has a dtype of its own.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.linear or len(node.args) < 2:
            continue
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        weight = node.args[1]
        if bias is not None or not isinstance(weight, fx.Node) or weight.target is not stored_as:
            continue
        scaled, stored = _scaled(weight.args[0]), weight.args[1]
        if scaled is None or weight.meta.get(OWN_DTYPE) or not _is_exact(stored):
            continue
        rows, products = scaled
        builder = NodeBuilder(graph, numbers)
        builder.start_before(node)
        operands = [part for product in products for part in product]
        new = builder.function(scaled_product, node.args[0], stored, rows, *operands)
        new.meta |= {VARIABLE: "result", EQUATIONS: weight.meta.get(EQUATIONS, ())}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if is_edit(node) and not node.users and node.op == "call_function" and PASS not in node.meta:
            graph.erase_node(node)


def _is_exact(stored: Any) -> bool:
    """Whether a weight is not in half precision, where the edited one is rounded once."""
    value = example(stored)
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)


def _scaled(node: Any) -> tuple[fx.Node, list[Product]] | None:
    """The factors of rows, and the thin products; None for another weight."""
    node = _without_casts(node)
    if not isinstance(node, fx.Node) or node.target is not operator.mul:
        return None
    left, right = node.args
    for rows, value in ((left, right), (right, left)):
        if _size(rows)[1:] == (1,) and isinstance(rows, fx.Node) and (products := _products(value)) is not None:
            return rows, products
    return None


def _products(node: Any) -> list[Product] | None:
    """The thin products that are added to the stored weight; None for another sum."""
    node = _without_casts(node)
    if not isinstance(node, fx.Node):
        return None
    if node.target is full_precision:
        return []
    if node.target is not add_to:
        return None
    args: tuple[Any, ...] = node.args
    before, product = _products(args[0]), _without_casts(args[1])
    if before is None or not isinstance(product, fx.Node) or product.target is not torch.matmul:
        return None
    left, right = product.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or not _is_thin(left, right):
        return None
    return [*before, (float(args[2]) if len(args) > 2 else 1.0, left, right)]


def _without_casts(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target is cast_like:
        node = node.args[0]
    return node


def _is_thin(left: fx.Node, right: fx.Node) -> bool:
    first, second = _size(left), _size(right)
    return len(first) == len(second) == 2 and first[1] * _THIN <= min(first[0], second[1])


def _size(node: Any) -> tuple[int, ...]:
    return node.meta.get(SIZE, ()) if isinstance(node, fx.Node) else ()


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
    inner = _plain_product(node)
    first = None if inner is None else _plain_product(inner[0])
    if inner is None or first is None or len(inner[0].users) > 1 or len(node.users) > 1:
        return None
    source = first[0]
    while isinstance(source, fx.Node) and source.target is cast_like:
        source = source.args[0]
    return (first[1], inner[1]) if source is x else None


def _plain_product(node: Any) -> tuple[Any, Any] | None:
    """Tokens and matrix of a product without a bias."""
    is_product = isinstance(node, fx.Node) and node.target is F.linear and len(node.args) == 2 and not node.kwargs
    return (node.args[0], node.args[1]) if is_product else None
