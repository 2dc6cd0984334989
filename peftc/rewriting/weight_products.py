"""Products with edited weights, computed without keeping the edited weight for the backward.

An edit of a weight gives `linear(x, s * (w + B @ A))`, with a factor in s for each row. The same is
`s * (linear(x, w) + linear(linear(x, A), B))`: autograd keeps activations, no weight of full size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from peftc.dataflow.nodes import example, is_edit
from peftc.equation_code.code import SIZE, VARIABLE
from peftc.equation_code.functions import add_to, cast_like
from peftc.rewriting.edits import EQUATIONS
from peftc.rewriting.node_builder import NodeBuilder
from peftc.runtime.parameters import full_precision, stored_as

_THIN = 4  # a product is thin whose inner dimension is so many times smaller than the weight's


@dataclass(frozen=True)
class Summand:
    """factor · rows ⊙ (left @ right), or of the stored weight where there is no product."""

    left: fx.Node | None = None
    right: fx.Node | None = None
    factor: float = 1.0
    rows: tuple[fx.Node, ...] = ()


def distribute_products(graph: fx.Graph, numbers: Iterator[int]) -> None:
    """Rewrites the products of tokens with edited weights that are sums of the weight and of thin
    products, times factors of rows.

    A product with a bias stays as it is: torch adds the bias in the product, and the model without
    its edits would not be equal bit for bit. So does one in half precision, where the edited weight
    is rounded once.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.linear or len(node.args) < 2:
            continue
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        weight = node.args[1]
        if bias is not None or not isinstance(weight, fx.Node) or weight.target is not stored_as:
            continue
        stored, summands = weight.args[1], _summands(weight.args[0])
        if summands is None or not isinstance(stored, fx.Node) or not _is_worth_it(summands, stored):
            continue
        builder = NodeBuilder(graph, numbers)
        builder.start_before(node)
        new = _product(builder, node.args[0], stored, summands)
        for part in builder.nodes:
            part.meta |= {VARIABLE: "result", EQUATIONS: weight.meta.get(EQUATIONS, ())}
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if is_edit(node) and not node.users and node.op == "call_function":
            graph.erase_node(node)


def _is_worth_it(summands: list[Summand], stored: fx.Node) -> bool:
    """Whether the weight is once among the summands, rows have factors, and nothing is rounded."""
    value = example(stored)
    is_exact = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.float64)
    return is_exact and sum(s.left is None for s in summands) == 1 and any(s.rows for s in summands)


def _summands(node: Any) -> list[Summand] | None:
    """A weight as a sum; None for another one."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args: tuple[Any, ...] = node.args
    if node.target is cast_like:
        return _summands(args[0])
    if node.target is full_precision:
        return [Summand()]
    if node.target is add_to:
        own, other = _summands(args[0]), _summands(args[1])
        if own is None or other is None:
            return None
        return [*own, *(replace(s, factor=s.factor * (args[2] if len(args) > 2 else 1.0)) for s in other)]
    if node.target is torch.matmul and _is_thin(*args):
        return [Summand(*args)]
    return _scaled(*args) if node.target is operator.mul else None


def _scaled(left: Any, right: Any) -> list[Summand] | None:
    for factor, value in ((left, right), (right, left)):
        if isinstance(factor, int | float):
            summands = _summands(value)
            return None if summands is None else [replace(s, factor=s.factor * factor) for s in summands]
        if _is_column(factor) and (summands := _summands(value)) is not None:
            return [replace(s, rows=(*s.rows, factor)) for s in summands]
    return None


def _is_column(node: Any) -> bool:
    return _size(node)[1:] == (1,)


def _is_thin(left: Any, right: Any) -> bool:
    first, second = map(_size, (left, right))
    return len(first) == len(second) == 2 and first[1] * _THIN <= min(first[0], second[1])


def _size(node: Any) -> tuple[int, ...]:
    return node.meta.get(SIZE, ()) if isinstance(node, fx.Node) else ()


def _product(builder: NodeBuilder, x: Any, stored: fx.Node, summands: list[Summand]) -> fx.Node:
    """x times each summand; summands with the same factors of rows are added before."""
    groups: dict[tuple[fx.Node, ...], list[Summand]] = {}
    for summand in sorted(summands, key=lambda summand: summand.left is not None):  # the weight first
        groups.setdefault(summand.rows, []).append(summand)
    total: fx.Node | None = None
    for rows, group in groups.items():
        value: fx.Node | None = None
        for summand in group:
            value = _added(builder, value, _term(builder, x, stored, summand), summand.factor)
        assert value is not None
        for factor in rows:
            vector = builder.function(torch.squeeze, factor, -1)
            value = builder.function(operator.mul, value, builder.function(cast_like, vector, value))
        total = value if total is None else builder.function(add_to, total, value)
    assert total is not None
    return total


def _added(builder: NodeBuilder, total: fx.Node | None, value: fx.Node, factor: float) -> fx.Node:
    if total is None:
        return value if factor == 1 else builder.function(operator.mul, value, factor)
    return builder.function(add_to, total, value, *(() if factor == 1 else (factor,)))


def _term(builder: NodeBuilder, x: Any, stored: fx.Node, summand: Summand) -> fx.Node:
    if summand.left is None or summand.right is None:
        return builder.function(F.linear, x, stored)
    thin = builder.function(F.linear, builder.function(cast_like, x, summand.right), summand.right)
    return builder.function(F.linear, thin, summand.left)
