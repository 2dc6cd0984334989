"""The residual stream of a layer: its input, and every sum that carries it on.

Hyper-connections carry several streams side by side, (batch, tokens, n, d). A sub-layer reads a
weighted sum of them, and its result is added to each times a factor; between sub-layers small
matrices mix them. Weights, factors and matrices are a token's, the same for all features.

Source: Zhu et al. 2024, "Hyper-Connections", arXiv:2409.19606.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import permutations, product
from typing import Any

from torch import fx

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import example, first_input, is_tensor, output_of, shape
from peftc.dataflow.operations import LAYOUT, SCALE, Op, dim_of, name_of, op_of, selects_along
from peftc.dataflow.sums import operands_of_sum
from peftc.dataflow.values import reaches, upstream, value_operands
from peftc.fakes.data_answers import tensors_in
from peftc.tracing.in_place import writes_to
from peftc.tracing.operations import new_version

_MOVES = LAYOUT | {Op.JOIN, Op.ITEM, Op.CREATE}


def stream_input(graph: fx.Graph) -> fx.Node | None:
    """The layer's hidden state: its first floating tensor argument. Of the members of an argument,
    the first that the layer puts back changed, or else the first that it computes with.
    """
    values = [n for n in graph.nodes if n.op == "placeholder" and is_tensor(n) and gives_states(n)]
    members = [n for n in graph.nodes if _is_member(n) and is_tensor(n) and gives_states(n)]
    members.sort(key=lambda n: not _is_put_back(n, graph))
    return next(iter((*values, *members)), None)


def other_streams(graph: fx.Graph, first: fx.Node) -> list[fx.Node]:
    """The other arguments of a layer that may be hidden states: those of the width of the first."""
    values = (n for n in graph.nodes if n.op == "placeholder" and n is not first and is_tensor(n) and gives_states(n))
    return [n for n in values if len(shape(n)) == len(shape(first)) > 2]


def _is_member(node: fx.Node) -> bool:
    """Whether a node is a member of an argument: of `*args`, a dictionary or a record."""
    # Seen in: no transformers model, but wrappers of layers (`forward(*args, **kwargs)`), and
    # pipelines whose layers take one state and return it
    source = node.args[0] if node.target in (operator.getitem, getattr) else None
    is_argument = isinstance(source, fx.Node) and source.op == "placeholder" and not is_tensor(source)
    return is_argument and any(user.op != "output" for user in node.users)


def _is_put_back(member: fx.Node, graph: fx.Graph) -> bool:
    """Whether the layer's result has a value that depends on a member in the place of it."""
    result: Any = output_of(graph).args[0]
    if isinstance(result, fx.Node) and isinstance(result.target, type):  # a record
        result = result.kwargs
    value = result.get(member.args[1]) if isinstance(result, Mapping) else None
    return isinstance(value, fx.Node) and value is not member and reaches(member, value)


class Stream:
    """What is the stream, and what only depends on it.

    Attributes:
        values: the layer's input and the sums so far.
        opaque: modules of the layer whose code could not be traced.
        beside: other streams of the layer.
        ends: sums of other layers in one graph with it.
    """

    def __init__(
        self,
        first: fx.Node,
        layer: LayerGraph,
        opaque: Collection[str] = (),
        beside: Sequence[Stream] = (),
        ends: Collection[fx.Node] = (),
    ) -> None:
        self.values, self.layer, self.opaque, self.beside, self.ends = [first], layer, opaque, beside, ends
        self._holds: dict[fx.Node, bool] = {}
        self._reaches: dict[fx.Node, bool] = {}
        self._bodies: dict[fx.Node, frozenset[fx.Node]] = {}

    def extend(self, *values: fx.Node) -> None:
        """Carries the stream on with these values."""
        self.values += values
        for answers in (self._holds, self._reaches, self._bodies):
            answers.clear()

    def starting_at(self, first: fx.Node) -> Stream:
        """The stream of the same layer that begins with another value."""
        return Stream(first, self.layer, self.opaque, self.beside, self.ends)

    def hides(self, node: fx.Node) -> bool:
        """Whether a node calls an opaque module that turns the stream into other hidden states."""
        # Seen in: Nemotron H Omni, whose `ffn` beside an untraced attention has no site without it
        return node.op == "call_module" and node.target in self.opaque and self.reaches(node) and gives_states(node)

    def is_changed_by_leaf(self, node: fx.Node) -> bool:
        """Whether a module without a known meaning computes other hidden states of the stream."""
        # Seen in: no transformers model, but stochastic depth as an autograd function
        source = first_input(node) if self.layer.op(node) is Op.MODULE else None
        return source is not None and shape(source) == shape(node) and self.reaches(source)

    def holds(self, node: fx.Node) -> bool:
        """Whether `node` is the stream itself, but for norms, dropout, casts, limits, constant
        factors and terms, and a selection of tokens; of several streams, a mixture.
        """
        if node not in self._holds:
            self._holds[node] = self._finds(node)
        return self._holds[node]

    def _finds(self, node: fx.Node) -> bool:
        source: fx.Node | None = node
        while source is not None and source not in self.values:
            streams = filter(self.holds, mixed_streams(source))
            same = self.layer.passes_through(source) or self._affine(source) or selected(source)
            source = same or next(streams, _overwritten(source))
        return source is not None

    def moves(self, node: fx.Node) -> bool:
        """Whether `node` is the stream with its entries in another order: flattened, transposed,
        rolled, cut into windows or put together again.
        """
        # Seen in: no transformers model, but DaViT, MaxViT, Swin with windows around a whole layer
        source: fx.Node | None = node
        while source is not None and not self.holds(source):
            same = self.layer.passes_through(source) or self._affine(source)
            source = same or (first_input(source) if op_of(source) in (Op.PERMUTE, Op.ROLL) else None)
        return source is not None and shape(node) != () and source is not node

    def shifts(self, node: fx.Node) -> bool:
        """Whether `node` is the stream with some features of other tokens, but for norms."""
        source: fx.Node | None = node
        while source is not None and not self.holds(source):
            source = self.layer.passes_through(source) or self._affine(source) or before_shift(source)
        return source is not None

    def _affine(self, node: fx.Node) -> fx.Node | None:
        """The operand of a norm, a scale or a bias."""
        # Seen in: nearly all
        if (norm := self.layer.normalization(node)) is not None:
            return norm.x
        inputs = [a for a in node.args if isinstance(a, fx.Node)]
        match self.layer.op(node):
            case Op.NORM:
                return first_input(node)
            case Op.MUL | Op.DIV:
                inputs = [a for a in inputs if self.reaches(a)]
                return inputs[0] if len(inputs) == 1 else None
            case Op.ADD if len(inputs) == len(operands_of_sum(node)):
                others = [a for a in inputs if a.op != "get_attr"]
                return others[0] if len(others) == 1 else None
            case _:
                return None

    def body(self, h: fx.Node) -> set[fx.Node]:
        """Everything that `h` is computed from, back to the stream (that included), to the sums of
        other layers, and to masks and indices that do not depend on the stream: earlier sub-layers
        may have computed these.
        """
        if h not in self._bodies:
            streams = (self, *self.beside)

            def is_start(node: fx.Node) -> bool:
                return any(s.holds(node) for s in streams) or node in self.ends or self._is_earlier_mask(node)

            self._bodies[h] = frozenset(upstream(h, is_start))
        return set(self._bodies[h])

    def _is_earlier_mask(self, node: fx.Node) -> bool:
        """Whether a mask or indices do not depend on the last value of the stream."""
        # Seen in: no transformers model, but attentions that drop tokens for the layers behind them
        return is_tensor(node) and not gives_states(node) and not reaches(self.values[-1], node)

    def is_own(self, node: fx.Node) -> bool:
        """Whether a value depends on no other stream of the layer but through this one."""
        behind = upstream(node, self.holds) if self.beside else ()
        return not any(side.holds(n) for n in behind for side in self.beside if not self.holds(n))

    def terms(self, add: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """What may be the stream, and what a sum adds to it or a difference takes away."""
        operands = list(filter(is_tensor, operands_of_sum(add)))
        if len(operands) > 2:  # without factors that another value than the stream gives
            operands = list(filter(self.reaches, operands))
        pairs = list(permutations(operands, 2)) if len(operands) == 2 else []
        if self.layer.op(add) is not Op.SUB:  # a mask to which scores are added has another shape
            pairs = [pair for pair in pairs if shape(pair[0])[1:] == shape(add)[1:]]
            return [(res, h) for res, h in pairs if not self._is_inner(add, res, h)]
        # a norm subtracts a mean of the stream
        return [pair for pair in pairs[:1] if any(map(self.layer.is_linear, self.body(pair[1])))]

    def _is_inner(self, add: fx.Node, res: fx.Node, h: fx.Node) -> bool:
        """Whether a sum of a norm of the stream and what does not attend is a part of what a later
        sum adds to the stream without this norm.
        """
        # Seen in: no transformers model, but FastViT: branches of a convolution, one of them a norm
        start = self.layer.without_norms(res)
        if start is self.layer.stripped(res) or any(op_of(n) in (Op.ATTENTION, Op.SOFTMAX) for n in self.body(h)):
            return False
        later = (n for n in self.layer.graph.nodes if n > add and self.layer.op(n) is Op.ADD)
        pairs = (pair for n in later for pair in permutations(operands_of_sum(n), 2))
        return any(self.layer.stripped(one) is start and reaches(add, other) for one, other in pairs if is_tensor(one))

    def end_of_step(self, h: fx.Node) -> fx.Node:
        """Of a step `w * (y - x)` from the stream x towards y: y, as of `x.lerp(y, w)`."""
        # Seen in: no transformers model, but nViT
        step = self.layer.stripped(h)
        while self.layer.op(step) in SCALE:
            factors = list(filter(self.reaches, step.all_input_nodes))
            if len(factors) != 1:
                return h
            step = self.layer.stripped(factors[0])
        operands = operands_of_sum(step) if self.layer.op(step) is Op.SUB else []
        is_step = len(operands) == 2 and self.holds(operands[1]) and not self.holds(operands[0])
        return operands[0] if is_step else h

    def is_own_step(self, h: fx.Node) -> bool:
        """Whether `w * (y - x)` leads from the stream at some tokens to what sub-layers have made
        of it: nothing is computed in it.
        """
        # Seen in: no transformers model, but mixtures of depths
        step = self.layer.stripped(h)
        while self.layer.op(step) in SCALE:
            inputs = list(map(self.layer.stripped, step.all_input_nodes))
            factors = [n for n in inputs if self.layer.op(n) is Op.SUB] or list(filter(self.reaches, inputs))
            if len(factors) != 1:
                return False
            (step,) = factors
        operands = operands_of_sum(step) if self.layer.op(step) is Op.SUB else []
        return len(operands) == 2 and all(self.holds(n) or self.moves(n) for n in operands)

    def is_share(self, res: fx.Node, h: fx.Node) -> bool:
        """Whether two terms are the stream times a gate and something else times the rest of it:
        `g * x + (1 - g) * y`.
        """
        # Seen in: no transformers model, but highway networks
        own = [gate for x, gate in _factors(self.layer.stripped(res)) if self.holds(x) and not self.holds(gate)]
        others = [gate for _, gate in _factors(self.layer.stripped(h))]
        return any(_is_rest(*pair) or _is_rest(*pair[::-1]) for pair in product(own, others))

    def without_other_tokens(self, h: fx.Node) -> fx.Node:
        """What a sub-layer computes of some tokens, without those of the stream put beside them."""
        # Seen in: no transformers model, but the class tokens of XCiT
        join = self.layer.stripped(h)
        parts = value_operands(join) if op_of(join) is Op.JOIN else []
        own = [part for part in parts if not self.holds(part)]
        return own[0] if len(own) == 1 < len(parts) else h

    def reaches(self, node: fx.Node) -> bool:
        """Whether `node` depends on the stream."""
        if node not in self._reaches:
            self._reaches[node] = any(n in self.values for n in upstream(node, lambda n: n in self.values))
        return self._reaches[node]

    def entry(self, body: set[fx.Node]) -> fx.Node | None:
        """What the first operation of a sub-layer reads, behind the norm."""
        inputs = (a for n in sorted(body) if not self.holds(n) for a in value_operands(n))
        return next((a for a in inputs if a in body and is_tensor(a) and self.holds(a)), None)

    def read_by(self, linear: fx.Node, entry: fx.Node | None) -> fx.Node | None:
        """What a Linear reads, if that is the stream; else `entry`, the input of the sub-layer."""
        # Seen in: JetMoE, whose experts compute the queries
        source = self.layer.input_of(linear)
        is_stream = source is not None and (entry is None or self.shifts(source) or self._is_modulated(source))
        return source if is_stream else entry

    def _is_modulated(self, node: fx.Node) -> bool:
        """Whether `node` is the stream times and plus values that are one for all tokens."""
        # Seen in: no transformers model, but norms whose scale and shift come from the mean token
        source: fx.Node | None = node
        while source is not None and not self.holds(source):
            whole = [n for n in value_operands(source) if shape(n) == shape(source)]
            by_example = op_of(source) in (Op.ADD, Op.SUB, *SCALE) and len(whole) == 1
            source = whole[0] if by_example else self.layer.passes_through(source)
        return source is not None


def gives_states(node: fx.Node) -> bool:
    """Whether any result is a tensor of floating numbers: not of indices alone."""
    return any(value.is_floating_point() for value in tensors_in(example(node)))


def _overwritten(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` has changed in place: in part, or through a view."""
    # Seen in: no transformers model, but layers of users that write into the stream
    source = first_input(node)
    if node.target is new_version:
        return source
    if source is None or not is_tensor(node) or op_of(node) in (Op.ADD, Op.ACCUMULATE, Op.WRITE):
        return None
    return source if writes_to(node, example(source)) else None


def selected(node: fx.Node) -> fx.Node | None:
    """The tensor of which `node` is some tokens, or one of several copies, with all features."""
    # Seen in: BLIP-2, Gemma 3n, Granite Speech
    if op_of(node) is Op.SELECT and node.target is not operator.getitem:
        return _gathered(node)
    source = first_input(node) if node.target is operator.getitem else None
    before, after = shape(source), shape(node)
    if not before or not after or before[-1] != after[-1] or isinstance(node.args[1], fx.Node):
        return None
    key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if ... in key:
        at = key.index(...)
        key = (*key[:at], *[slice(None)] * (len(before) - len(key) + 1), *key[at + 1 :])
    all_features = len(key) < len(before) or key[-1] == slice(None)
    return source if all_features and all(isinstance(k, (int, slice, fx.Node)) for k in key) else None


def _gathered(node: fx.Node) -> fx.Node | None:
    """The tensor of which a function or method gathers some tokens with all features."""
    # Seen in: no transformers model, but mixtures of depths
    source, dim, index = first_input(node), dim_of(node), node.args[2] if len(node.args) > 2 else None
    if source is None or not isinstance(dim, int) or dim % len(shape(source)) == len(shape(source)) - 1:
        return None
    if selects_along(node):
        return source
    spread = first_input(index) if isinstance(index, fx.Node) and op_of(index) is Op.EXPAND else None
    is_of_all = shape(spread)[-1:] == (1,) and shape(node)[-1:] == shape(source)[-1:]
    return source if name_of(node) == "gather" and is_of_all else None


def before_shift(node: fx.Node) -> fx.Node | None:
    """The tensor of whose entries alone a joined value of its shape is made."""
    # Seen in: no transformers model, but MEGABYTE: half of the features are of the token before
    if op_of(node) is not Op.JOIN:
        return None
    behind = list(upstream(node, lambda n: n is not node and shape(n) == shape(node)))
    sources = [n for n in behind if n is not node and shape(n) == shape(node)]
    moves = all(op_of(n) in _MOVES or name_of(n) == "pad" for n in behind if n not in sources)
    return sources[0] if moves and len(sources) == 1 else None


def mixed_streams(node: fx.Node) -> list[fx.Node]:
    """What may be the streams that `node` mixes: by a matrix, or to one by a weighted sum."""
    # Seen in: DeepSeek V4, GLM 5
    if op_of(node) is Op.MATMUL and len(node.args) == 2:
        matrix, streams = node.args
        is_small = shape(matrix)[-2:] == (shape(streams)[-2:-1] * 2)
        return [streams] if isinstance(streams, fx.Node) and is_small and has_several_streams(streams) else []
    products = first_input(node) if name_of(node) == "sum" else None
    if products is None or shape(products)[:2] + shape(products)[3:] != shape(node):
        return []
    return [s for s, factor in _factors(products) if has_several_streams(s) and shape(factor) == (*shape(s)[:-1], 1)]


def sublayer_output(node: fx.Node) -> fx.Node:
    """What is added to each of several streams, before the factor of each."""
    # Seen in: DeepSeek V4, GLM 5
    sizes = shape(node)
    for value, factor in _factors(node):
        single = first_input(value) if name_of(value) == "unsqueeze" else None
        is_spread = shape(value) == (*sizes[:2], 1, *sizes[3:]) and shape(factor) == (*sizes[:-1], 1)
        if single is not None and is_spread and has_several_streams(node) and shape(single) == sizes[:2] + sizes[3:]:
            return single
    return node


def _is_rest(rest: fx.Node, gate: fx.Node) -> bool:
    """Whether a value is a number minus a gate."""
    return op_of(rest) is Op.SUB and value_operands(rest) == [gate]


def has_several_streams(node: fx.Node) -> bool:
    return len(shape(node)) == 4


def _factors(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors that are multiplied element by element, in both orders."""
    if op_of(product) not in SCALE or len(product.args) != 2:
        return []
    one, other = product.args
    return [(one, other), (other, one)] if isinstance(one, fx.Node) and isinstance(other, fx.Node) else []
