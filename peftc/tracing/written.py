"""What it takes to join rows to the keys and values of an attention that is written out.

    softmax(s(q kᵀ)) v   becomes   softmax([s'(q Pₖᵀ), s(q kᵀ)]) [Pᵥ; v]

where s are the steps from the scores to the softmax, and s' those of them that are not about single keys: a scale, a cast; not
a mask or a position bias, which leave the joined rows open.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn

from peftc.forms.shapes import KeyValue
from peftc.tracing import graphs
from peftc.tracing.attention import Attention

_SUMS = (
    *(operator.add, operator.iadd, operator.sub, torch.add, torch.sub, torch.where, torch.masked_fill, torch.cat),
    *(torch.max, torch.maximum),  # with the smallest number there is
)
_SCALES = (operator.mul, operator.truediv, torch.mul, torch.div)
_ELEMENTWISE = (nn.functional.dropout, torch.dropout, torch.clamp, torch.tanh)
_SHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous"})
_CASTS = frozenset({"to", "float", "type", "type_as", "tanh", "clamp", "contiguous"})


@dataclass(frozen=True, eq=False)
class Step:
    """What a node of the way, which takes `before`, does to joined rows: the same as to the others, nothing, or a change of
    shape.
    """

    node: fx.Node
    before: fx.Node
    does: Literal["same", "nothing", "shape"]


@dataclass(frozen=True)
class Layout:
    """Where an operand of a product has batch, heads, tokens and features: positions in (batch, heads, tokens, features).

    `merged`: batch and heads are one dimension.
    """

    order: tuple[int, ...]
    merged: bool = False


@dataclass(frozen=True, eq=False)
class Joining:
    """How rows get into an attention: layouts of its keys and values, the ways of scores and of probabilities."""

    keys: Layout
    values: Layout
    scores: list[Step]
    probabilities: list[Step]


def way(start: fx.Node, end: fx.Node) -> list[Step] | None:
    """The steps from one node to another; None where one of them cannot be done to joined rows."""
    steps: list[Step] = []
    node = end
    while node is not start:
        before = [n for n in node.all_input_nodes if reaches(start, n)]
        does = kind_of(node, before[0]) if len(before) == 1 else None
        if does is None:
            return None
        steps.append(Step(node, before[0], does))
        node = before[0]
    return steps[::-1]


def kind_of(node: fx.Node, before: fx.Node) -> Literal["same", "nothing", "shape"] | None:
    if graphs.is_edit(node):
        return "nothing"
    if node.op == "call_module":
        return "same" if graphs.shape(node) == graphs.shape(before) else None
    if node.op == "call_method":
        name = str(node.target)
        if name in ("masked_fill", "masked_fill_", "add", "add_", "sub"):
            return "nothing"
        if name in ("mul", "div"):
            return scaling(node, before)
        return "shape" if name in _SHAPES else "same" if name in _CASTS else None
    if node.target in _SUMS:
        return "nothing"
    if node.target in _SCALES:
        return scaling(node, before)
    return "same" if node.target in _ELEMENTWISE else None


def scaling(node: fx.Node, before: fx.Node) -> Literal["same", "nothing"]:
    """A factor for each key is a mask; any other is a scale."""
    others = [shape for n in node.all_input_nodes if n is not before and (shape := graphs.shape(n))]
    return "nothing" if any(shape[-1] > 1 for shape in others) else "same"


def operand_layout(product: fx.Node, operand: fx.Node, keys: bool) -> Layout | None:
    if product.target is torch.einsum:
        return einsum_layout(product, operand, keys)
    shape = graphs.shape(operand)
    if len(shape) == 4:
        return Layout((0, 1, 3, 2) if keys else (0, 1, 2, 3))
    return Layout((0, 2, 1) if keys else (0, 1, 2), merged=True) if len(shape) == 3 else None


def einsum_layout(product: fx.Node, operand: fx.Node, keys: bool) -> Layout | None:
    """By the labels: features are summed over with the queries, tokens with the probabilities; batch comes before heads."""
    inputs, _, result = str(product.args[0]).replace(" ", "").partition("->")
    labels = inputs.split(",")
    given = product.args[1] if isinstance(product.args[1], (tuple, list)) else product.args[1:]
    mine = next((text for text, node in zip(labels, given, strict=False) if node is operand), "")
    other = next((text for text, node in zip(labels, given, strict=False) if node is not operand), "")
    summed = [c for c in mine if c not in result]
    alone = [c for c in mine if c in result and c not in other]
    shared = [c for c in mine if c in result and c in other]
    if len(mine) != 4 or len(summed) != 1 or len(alone) != 1 or len(shared) != 2:
        return None
    tokens, features = (alone[0], summed[0]) if keys else (summed[0], alone[0])
    batch, heads = sorted(shared, key=result.index)
    return Layout(tuple((batch, heads, tokens, features).index(c) for c in mine))


def joining(attention: Attention) -> Joining | None:
    """How rows can be joined to the keys and values; None where they cannot."""
    first, scores = graphs.first_input(attention.call), attention.scores
    behind = [n for n in attention.out.all_input_nodes if reaches(attention.call, n)]
    if first is None or scores is None or len(behind) != 1:
        return None
    ways = way(scores, first), way(attention.call, behind[0])
    keys, values = operand_layout(scores, attention.k, True), operand_layout(attention.out, attention.v, False)
    if keys is None or values is None or ways[0] is None or ways[1] is None or keys.merged != values.merged:
        return None
    return Joining(keys, values, ways[0], ways[1])


def reaches(start: fx.Node, node: fx.Node) -> bool:
    return start in graphs.upstream(node, lambda m: m is start)


def written_shape(attention: Attention, q_width: int | None) -> KeyValue | None:
    """The rows that can be joined; `q_width`: features of the Linear that makes the queries."""
    found = joining(attention)
    if found is None:
        return None
    heads, d_head = sized(found.keys, graphs.shape(attention.k))
    _, d_value = sized(found.values, graphs.shape(attention.v))
    if heads is None and q_width is not None and q_width % d_head == 0:
        heads = q_width // d_head
    return KeyValue(heads, d_head, None if d_value == d_head else d_value) if heads is not None else None


def sized(layout: Layout, shape: tuple[int, ...]) -> tuple[int | None, int]:
    """Heads (None where they are merged with the batch) and features of an operand."""
    features = shape[layout.order.index(2 if layout.merged else 3)]
    return None if layout.merged else shape[layout.order.index(1)], features
