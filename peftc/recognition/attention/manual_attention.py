"""How rows are joined to the keys and values of an attention that is written out.

    softmax(s(q kᵀ)) v   becomes   softmax([s'(q Pₖᵀ), s(q kᵀ)]) [Pᵥ; v]

where s are the steps from the scores to the softmax, and s' those of them that are not about single
keys: a scale, a cast; not a mask or a position bias, which leave the joined rows visible.
"""

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from peftc.dataflow.einsum import einsum_labels, einsum_operands, is_einsum
from peftc.dataflow.features import dims_of, separates, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, is_edit, is_tensor, shape
from peftc.dataflow.operations import Op
from peftc.dataflow.values import reaches, upstream, value_operands
from peftc.forms.shapes import KeyValue
from peftc.recognition.attention.patterns import Attention, factors
from peftc.tracing.operations import autograd_function

BATCH, HEADS, TOKENS, FEATURES, BLOCKS = range(5)

Effect = Literal["same", "nothing", "shape"]
_EFFECTS: dict[Op, Effect] = {
    **dict.fromkeys((Op.MASK, Op.JOIN), "nothing"),
    **dict.fromkeys((Op.CAST, Op.CLAMP, Op.DROPOUT, Op.ACTIVATION), "same"),
    Op.RESHAPE: "shape",
}


@dataclass(frozen=True, eq=False)
class Step:
    """What a node between scores and softmax, which reads `source`, does to joined rows."""

    node: fx.Node
    source: fx.Node
    effect: Effect


@dataclass(frozen=True)
class Layout:
    """What each dimension of an operand is: batch, heads, tokens, features or blocks of tokens
    (windows that attend by themselves). `merged`: batch and heads are one dimension.
    """

    order: tuple[int, ...]
    merged: bool = False

    @property
    def features(self) -> int:
        return self.order.index(2 if self.merged else FEATURES)


@dataclass(frozen=True, eq=False)
class Joining:
    """How rows get into an attention."""

    keys: Layout
    values: Layout
    scores: list[Step]
    probabilities: list[Step]


def joining(attention: Attention, layer: LayerGraph) -> Joining | None:
    """How rows can be joined to the keys and values; None where they cannot."""
    logits, scores = first_input(attention.call), attention.scores
    sources = [n for n in value_operands(attention.out) if reaches(attention.call, n)]
    maskable = visible_value(attention.call) is not None or not any(map(is_tensor, attention.call.args[1:]))
    if logits is None or scores is None or len(sources) != 1 or not maskable:
        return None
    if attention.k is not factors(scores)[1]:  # scores of keys and queries, the other way around
        return None
    before, after = _steps(scores, logits, layer), _steps(attention.call, sources[0], layer)
    keys = _operand_layout(scores, attention.k, True, layer)
    values = _operand_layout(attention.out, attention.v, False, layer)
    if keys is None or values is None or before is None or after is None or keys.merged != values.merged:
        return None
    if not separates(attention.k, keys.features, layer) or not separates(attention.v, values.features, layer):
        return None  # features attend to features
    return Joining(keys, values, before, after)


def _steps(start: fx.Node, end: fx.Node, layer: LayerGraph) -> list[Step] | None:
    """The steps from one node to another; None where one of them cannot be done to joined rows."""
    steps: list[Step] = []
    while (node := steps[0].source if steps else end) is not start:
        sources = [n for n in value_operands(node) if reaches(start, n)]
        if layer.op(node) is Op.SUB and len(sources) == 2 and shape(sources[1])[-1:] == (1,):
            sources.pop()  # the largest score of a query, which leaves the softmax as it is
        effect = _effect(node, sources[0], layer) if len(sources) == 1 else None
        if effect is None:
            return None
        steps.insert(0, Step(node, sources[0], effect))
    return steps


def _effect(node: fx.Node, source: fx.Node, layer: LayerGraph) -> Effect | None:
    op = layer.op(node)
    if is_edit(node):
        return "nothing"
    if op is Op.ADD and any(map(_counts_from_the_end, upstream(node, lambda n: n is source))):
        return None
    if node.op == "call_module":
        return "same" if shape(node) == shape(source) else None
    if op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV):  # a number for each key is a mask or a bias, any other one is for all
        others = [sizes for n in node.all_input_nodes if n is not source and (sizes := shape(n))]
        return "nothing" if any(sizes[-1] > 1 for sizes in others) else "same"
    if node.target is operator.getitem:  # some of the keys, of all queries
        same = len(shape(node)) == len(shape(source)) and shape(node)[:-1] == shape(source)[:-1]
        return "nothing" if same else None
    return _EFFECTS.get(op)


def _counts_from_the_end(node: fx.Node) -> bool:
    """Whether a table of differences between keys ends at the last key: joined rows have none."""
    # Seen in: MPT, whose prefixes would shift the positions
    key = node.args[1] if node.target is operator.getitem else ()
    last = key[-1] if isinstance(key, tuple) and len(key) == len(shape(node)) and key else None
    return isinstance(last, slice) and isinstance(last.start, fx.Node)


def _operand_layout(product: fx.Node, operand: fx.Node, is_keys: bool, layer: LayerGraph) -> Layout | None:
    if is_einsum(product):
        return _einsum_layout(product, operand, is_keys, layer)
    last = (FEATURES, TOKENS) if is_keys else (TOKENS, FEATURES)
    match len(shape(operand)):
        case 3:
            return Layout((0, 2, 1) if is_keys else (0, 1, 2), merged=True)
        case 4:
            return Layout((BATCH, HEADS, *last))
        case 5:
            width = shape(operand)[3 + last.index(FEATURES)]
            heads = _heads_dim((1, 2), width, operand, layer)
            inner = (HEADS, BLOCKS) if heads == 1 else (BLOCKS, HEADS)
            return None if heads is None else Layout((BATCH, *inner, *last))
        case _:
            return None


def _einsum_layout(product: fx.Node, operand: fx.Node, is_keys: bool, layer: LayerGraph) -> Layout | None:
    """Features are summed over with the queries, tokens with the probabilities."""
    operands, (labels, result) = einsum_operands(product), einsum_labels(product)
    own = next((text for text, node in zip(labels, operands, strict=False) if node is operand), "")
    other = next((text for text, node in zip(labels, operands, strict=False) if node is not operand), "")
    summed = [c for c in own if c not in result]
    single = [c for c in own if c in result and c not in other]
    shared = sorted((c for c in own if c in result and c in other), key=result.index)
    if len(summed) != 1 or len(single) != 1 or len(own) != len(shared) + 2 or len(shared) not in (2, 3):
        return None
    tokens, feature = (single[0], summed[0]) if is_keys else (summed[0], single[0])
    roles = {shared[0]: BATCH, tokens: TOKENS, feature: FEATURES}
    if len(shared) == 2:
        return Layout(tuple({**roles, shared[1]: HEADS}[c] for c in own))
    dims = [own.index(c) for c in shared[1:] if not c.isdigit()]
    width = shape(operand)[own.index(feature)]
    heads = dims[0] if len(dims) == 1 else _heads_dim(dims, width, operand, layer)
    return None if heads is None else Layout(tuple({**roles, own[heads]: HEADS}.get(c, BLOCKS) for c in own))


def _heads_dim(dims: Sequence[int], width: int, operand: fx.Node, layer: LayerGraph) -> int | None:
    """Which of some dimensions is that of heads, of `width` features each: the one that tells
    features of a Linear apart, or the only one whose size fits.
    """
    # Seen in: Hiera, Pegasus-X, ProphetNet
    heads = dims_of(operand, layer).intersection(dims)
    widths = {rows.width if rows else shape(n)[-1] for n, rows in source_linears(layer, operand)}
    heads = heads or {dim for dim in dims if shape(operand)[dim] * width in widths}
    return heads.pop() if len(heads) == 1 else None


def visible_value(softmax: fx.Node) -> float | None:
    """The value that the mask beside the scores has for keys that count, in a softmax of the
    model's own; None where it has no mask, or an unknown one.
    """
    # Seen in: SEW-D, whose mask would hide joined keys
    masks = [i for i, a in enumerate(softmax.args[1:], 1) if is_tensor(a)]
    if softmax.target is not autograd_function or len(masks) != 1:
        return None
    like: torch.Tensor = example(softmax.args[masks[0]])  # pyright: ignore[reportAssignmentType]
    scores, mask = torch.zeros(1, 1, 1, 2), torch.tensor([1, 0]).to(like.dtype).view(*[1] * (like.ndim - 1), 2)
    args = [scores, *softmax.args[1:]]
    args[masks[0]] = mask
    with contextlib.suppress(Exception), torch.no_grad():  # it may take something else
        weights = autograd_function(*args, **softmax.kwargs).flatten().tolist()  # pyright: ignore[reportArgumentType]
        return {(1.0, 0.0): 1.0, (0.0, 1.0): 0.0}.get(tuple(weights))
    return None


def joined_shape(attention: Attention, q_width: int | None, layer: LayerGraph) -> KeyValue | None:
    """The shape of rows that can be joined. `q_width`: features of the queries' Linear."""
    if (plan := joining(attention, layer)) is None:
        return None
    heads = None if plan.keys.merged else shape(attention.k)[plan.keys.order.index(HEADS)]
    d_head, d_value = shape(attention.k)[plan.keys.features], shape(attention.v)[plan.values.features]
    if heads is None and q_width is not None and q_width % d_head == 0:
        heads = q_width // d_head
    return KeyValue(heads, d_head, None if d_value == d_head else d_value) if heads is not None else None
