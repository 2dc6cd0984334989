"""What it takes to join rows to the keys and values of an attention that is written out.

    softmax(s(q kᵀ)) v   becomes   softmax([s'(q Pₖᵀ), s(q kᵀ)]) [Pᵥ; v]

where s are the steps from the scores to the softmax, and s' those of them that are not about single keys: a scale, a cast; not
a mask or a position bias, which leave the joined rows open.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx, nn

from peftc.forms.shapes import KeyValue
from peftc.recognition.attention.patterns import Attention, operands
from peftc.recognition.graph import features, nodes
from peftc.recognition.graph.value_operands import value_operands
from peftc.tracing.patches import autograd_function

_SUMS = (
    *(operator.add, operator.iadd, operator.sub, torch.add, torch.sub, torch.where, torch.masked_fill, torch.cat),
    *(torch.max, torch.maximum),  # with the smallest number there is
)
_SCALES = (operator.mul, operator.truediv, torch.mul, torch.div)
_ELEMENTWISE = (nn.functional.dropout, torch.dropout, torch.clamp, torch.tanh)
_SHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous"})
_CASTS = frozenset({"to", "float", "type", "type_as", "tanh", "clamp", "contiguous"})


BATCH, HEADS, TOKENS, FEATURES, BLOCKS = range(5)


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
    """Which of batch, heads, tokens and features each dimension of an operand of a product is; or one more, of blocks of tokens
    (windows) that attend by themselves.

    `merged`: batch and heads are one dimension.
    """

    order: tuple[int, ...]
    merged: bool = False

    @property
    def features(self) -> int:
        """The dimension of the features."""
        return self.order.index(2 if self.merged else FEATURES)


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
        before = [n for n in value_operands(node) if reaches(start, n)]
        does = kind_of(node, before[0]) if len(before) == 1 else None
        if does is None:
            return None
        steps.append(Step(node, before[0], does))
        node = before[0]
    return steps[::-1]


def kind_of(node: fx.Node, before: fx.Node) -> Literal["same", "nothing", "shape"] | None:
    if nodes.is_edit(node):
        return "nothing"
    if nodes.is_add(node) and any(map(counted_from_the_end, nodes.upstream(node, lambda n: n is before))):
        return None
    if node.op == "call_module":
        return "same" if nodes.shape(node) == nodes.shape(before) else None
    if node.op == "call_method":
        name = str(node.target)
        if name in ("masked_fill", "masked_fill_", "add", "add_", "sub"):
            return "nothing"
        if name in ("mul", "div"):
            return scaling(node, before)
        return "shape" if name in _SHAPES else "same" if name in _CASTS else None
    if node.target in _SUMS or cuts_keys(node, before):
        return "nothing"
    if node.target in _SCALES:
        return scaling(node, before)
    return "same" if node.target in _ELEMENTWISE else None


def counted_from_the_end(node: fx.Node) -> bool:
    """Whether a table is cut so that its last entry is that of the last key, whichever that is: only differences between keys
    count in it, and a joined row has none to the others.
    """
    cut = node.args[1] if node.target is operator.getitem else ()
    last = cut[-1] if isinstance(cut, tuple) and len(cut) == len(nodes.shape(node)) and cut else None
    return isinstance(last, slice) and isinstance(last.start, fx.Node)


def cuts_keys(node: fx.Node, before: fx.Node) -> bool:
    """Whether some of the keys are taken, of all queries."""
    one, other = nodes.shape(node), nodes.shape(before)
    return node.target is operator.getitem and len(one) == len(other) and one[:-1] == other[:-1]


def scaling(node: fx.Node, before: fx.Node) -> Literal["same", "nothing"]:
    """A factor for each key is a mask; any other is a scale."""
    others = [shape for n in node.all_input_nodes if n is not before and (shape := nodes.shape(n))]
    return "nothing" if any(shape[-1] > 1 for shape in others) else "same"


def operand_layout(product: fx.Node, operand: fx.Node, keys: bool, root: nn.Module) -> Layout | None:
    if product.target is torch.einsum:
        return einsum_layout(product, operand, keys, root)
    last = (FEATURES, TOKENS) if keys else (TOKENS, FEATURES)
    match len(nodes.shape(operand)):
        case 3:
            return Layout((0, 2, 1) if keys else (0, 1, 2), merged=True)
        case 4:
            return Layout((BATCH, HEADS, *last))
        case 5:
            width = nodes.shape(operand)[3 + last.index(FEATURES)]
            heads = heads_among((1, 2), width, operand, root)
            return (
                None if heads is None else Layout((BATCH, *((HEADS, BLOCKS) if heads == 1 else (BLOCKS, HEADS)), *last))
            )
        case _:
            return None


def einsum_layout(product: fx.Node, operand: fx.Node, keys: bool, root: nn.Module) -> Layout | None:
    """By the labels: features are summed over with the queries, tokens with the probabilities; batch comes before heads."""
    given = product.args[1] if isinstance(product.args[1], (tuple, list)) else product.args[1:]
    labels, result = labelled(str(product.args[0]), [len(nodes.shape(n)) for n in given])
    mine = next((text for text, node in zip(labels, given, strict=False) if node is operand), "")
    other = next((text for text, node in zip(labels, given, strict=False) if node is not operand), "")
    summed = [c for c in mine if c not in result]
    alone = [c for c in mine if c in result and c not in other]
    shared = sorted((c for c in mine if c in result and c in other), key=result.index)
    if len(summed) != 1 or len(alone) != 1 or len(mine) != len(shared) + 2 or len(shared) not in (2, 3):
        return None
    tokens, feature = (alone[0], summed[0]) if keys else (summed[0], alone[0])
    named = {shared[0]: BATCH, tokens: TOKENS, feature: FEATURES}
    if len(shared) == 2:
        return Layout(tuple({**named, shared[1]: HEADS}[c] for c in mine))
    digits = [c for c in shared if c.isdigit()]
    places = [mine.index(c) for c in shared[1:] if c not in digits]
    heads = (
        places[0] if len(places) == 1 else heads_among(places, nodes.shape(operand)[mine.index(feature)], operand, root)
    )
    return None if heads is None else Layout(tuple({**named, mine[heads]: HEADS}.get(c, BLOCKS) for c in mine))


def heads_among(places: Sequence[int], width: int, operand: fx.Node, root: nn.Module) -> int | None:
    """Which of some dimensions of an operand is that of heads, of `width` features each: the one that tells features of a Linear
    apart, or the only one that can be for its size.
    """
    told = features.dims_of(operand, root).intersection(places)
    widths = {rows.width if rows else nodes.shape(n)[-1] for n, rows in features.source_linears(operand, root)}
    found = told or {place for place in places if nodes.shape(operand)[place] * width in widths}
    return found.pop() if len(found) == 1 else None


def labelled(equation: str, dimensions: list[int]) -> tuple[list[str], str]:
    """The labels of an einsum's operands and of its result, those that `...` stands for as digits."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    texts = inputs.split(",")
    digits = ["0123456789"[: n - len(t.replace("...", ""))] for t, n in zip(texts, dimensions, strict=False)]
    most = max(digits, key=len)
    found = [t.replace("...", most[len(most) - len(d) :]) for t, d in zip(texts, digits, strict=False)]
    return found, result.replace("...", most)


def visible(softmax: fx.Node) -> float | None:
    """What the mask beside the scores has for keys that count, as a softmax of its own is seen to take it; None where it has no
    mask, or one that cannot be told.
    """
    masks = [i for i, a in enumerate(softmax.args[1:], 1) if nodes.is_tensor(a)]
    if softmax.target is not autograd_function or len(masks) != 1:
        return None
    like: torch.Tensor = nodes.example(softmax.args[masks[0]])  # pyright: ignore[reportAssignmentType]
    scores, mask = torch.zeros(1, 1, 1, 2), torch.tensor([1, 0]).to(like.dtype).view(*[1] * (like.ndim - 1), 2)
    args = [scores, *softmax.args[1:]]
    args[masks[0]] = mask
    with contextlib.suppress(Exception), torch.no_grad():  # of what takes something else
        weights = autograd_function(*args, **softmax.kwargs).flatten().tolist()  # pyright: ignore[reportArgumentType]
        return {(1.0, 0.0): 1.0, (0.0, 1.0): 0.0}.get(tuple(weights))
    return None


def maskable(softmax: fx.Node) -> bool:
    """Whether joined keys can be made to count."""
    return visible(softmax) is not None or not any(nodes.is_tensor(a) for a in softmax.args[1:])


def joining(attention: Attention, root: nn.Module) -> Joining | None:
    """How rows can be joined to the keys and values; None where they cannot."""
    first, scores = nodes.first_input(attention.call), attention.scores
    behind = [n for n in value_operands(attention.out) if reaches(attention.call, n)]
    if first is None or scores is None or len(behind) != 1 or not maskable(attention.call):
        return None
    if attention.k is not operands(scores)[1]:  # scores of keys and queries, the other way around
        return None
    ways = way(scores, first), way(attention.call, behind[0])
    keys = operand_layout(scores, attention.k, True, root)
    values = operand_layout(attention.out, attention.v, False, root)
    if keys is None or values is None or ways[0] is None or ways[1] is None or keys.merged != values.merged:
        return None
    if not features.separates(attention.k, keys.features, root) or not features.separates(
        attention.v, values.features, root
    ):
        return None  # features attend to features
    return Joining(keys, values, ways[0], ways[1])


def reaches(start: fx.Node, node: fx.Node) -> bool:
    return start in nodes.upstream(node, lambda m: m is start)


def written_shape(attention: Attention, q_width: int | None, root: nn.Module) -> KeyValue | None:
    """The rows that can be joined; `q_width`: features of the Linear that makes the queries."""
    found = joining(attention, root)
    if found is None:
        return None
    heads, d_head = sized(found.keys, nodes.shape(attention.k))
    _, d_value = sized(found.values, nodes.shape(attention.v))
    if heads is None and q_width is not None and q_width % d_head == 0:
        heads = q_width // d_head
    return KeyValue(heads, d_head, None if d_value == d_head else d_value) if heads is not None else None


def sized(layout: Layout, shape: tuple[int, ...]) -> tuple[int | None, int]:
    """Heads (None where they are merged with the batch) and features of an operand."""
    return None if layout.merged else shape[layout.order.index(HEADS)], shape[layout.features]
