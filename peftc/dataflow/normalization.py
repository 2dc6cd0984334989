"""Norms that code computes itself: h = w * (x - m) / s + b, where m and s are a token's.

`F.layer_norm(x, sizes, self.norm.weight)` and `x * rsqrt(mean(x²)) * self.g` compute what a module
does. The mean and the scale are sums over features of x, and depend on nothing else.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx, nn
from torch.overrides import get_testing_overrides

from peftc.dataflow.matrices import MatrixPart, part_of
from peftc.dataflow.nodes import example, first_input, is_tensor, shape
from peftc.dataflow.operations import SCALE, Op, op_of
from peftc.dataflow.values import upstream, value_operands

_ENDS = frozenset({Op.NORM, Op.ADD, *SCALE})
_STEPS = frozenset({*_ENDS, Op.SUB, Op.CAST})


@dataclass(eq=False)
class Normalization:
    """A norm that ends at a node. `nodes`: all that compute it from `x`. A `weight` or `bias` of
    several dimensions is one vector.
    """

    x: fx.Node
    nodes: set[fx.Node] = field(default_factory=set[fx.Node], repr=False)
    weight: MatrixPart | None = None
    bias: MatrixPart | None = None


def normalization(result: fx.Node, is_plain: Callable[[fx.Node], bool]) -> Normalization | None:
    """The norm that ends with an operation; None for any other operation. `is_plain`: whether a
    node calls a norm without parameters.
    """
    if op_of(result) not in _ENDS:
        return None
    norm, statistics, is_scaled, node = Normalization(result), list[fx.Node](), False, result
    while is_tensor(node) and (op_of(node) in _STEPS or is_plain(node)):
        norm.nodes.add(node)
        if is_plain(node) or op_of(node) is Op.NORM:  # behind which a statistic is a factor of something else
            return None if statistics else _with_function(norm, node)
        count = len(statistics)
        if (source := _step(node, norm, statistics)) is None:
            return None
        is_scaled = is_scaled or (len(statistics) > count and op_of(node) in SCALE)
        node = norm.x = source
        if is_scaled and (inside := _nodes_between(node, statistics)) is not None:
            norm.nodes |= inside
            return norm
    return None


def _step(node: fx.Node, norm: Normalization, statistics: list[fx.Node]) -> fx.Node | None:
    """The operand that an operation scales or shifts; by what goes to `norm` or `statistics`."""
    tensors = [n for n in value_operands(node) if is_tensor(n)]
    if len(tensors) == 1:
        return tensors[0]
    if len(tensors) != 2:
        return None
    for source, other in (tensors, tensors[::-1]):
        name = {Op.MUL: "weight", Op.ADD: "bias"}.get(op_of(node))
        if name is not None and getattr(norm, name) is None and (part := _vector(other)) is not None:
            setattr(norm, name, part)
            return source
        if _is_constant(other):
            return source
        if op_of(node) is not Op.ADD and _is_statistic(other, node) and (op_of(node) is Op.MUL or source is tensors[0]):
            statistics.append(other)
            return source
    return None


def _vector(node: fx.Node) -> MatrixPart | None:
    """The parameter of a scale or a shift, to which a number may be added."""
    # Seen in: Gemma (1 + w)
    while op_of(node) is Op.ADD and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return part_of(node, range(len(shape(node))), ())


def _is_statistic(value: fx.Node, node: fx.Node) -> bool:
    """Whether a value is one for all features of a token, and a sum over some."""
    pairs = [*zip(shape(value), shape(node), strict=False)]
    reduced = [one for one, many in pairs if one != many]
    is_one = len(shape(value)) == len(shape(node)) and bool(reduced) and {*reduced} == {1}
    return is_one and any(op_of(n) in (Op.SUM, Op.NORM) for n in upstream(value))


def _nodes_between(x: fx.Node, statistics: Iterable[fx.Node]) -> set[fx.Node] | None:
    """The nodes that compute statistics from x; None where they need anything else."""
    nodes = {n for s in statistics for n in upstream(s, lambda n: n is x)}
    ends = [n for n in nodes if n is not x and not value_operands(n)]
    return nodes - {x} if x in nodes and all(map(_is_constant, ends)) else None


def _is_constant(node: fx.Node) -> bool:
    """Whether a value is computed from neither parameters nor activations."""
    ends = (n for n in upstream(node) if not value_operands(n))  # the first one mostly tells
    return all(op_of(n) is Op.PARAMETER and not isinstance(example(n), nn.Parameter) for n in ends)


def _with_function(norm: Normalization, call: fx.Node) -> Normalization | None:
    """The norm that ends behind one of PyTorch's functions, or a module without parameters."""
    arguments = _arguments(call)
    for name in ("weight", "bias"):
        if isinstance(value := arguments.get(name), fx.Node) and not _is_constant(value):
            if getattr(norm, name) is not None or (part := _vector(value)) is None:
                return None
            setattr(norm, name, part)
    if (source := first_input(call)) is None:
        return None
    norm.x = source
    return norm


def _arguments(call: fx.Node) -> dict[str, Any]:
    signature = _signature(call.target)
    return {} if signature is None else dict(signature.bind(*call.args, **call.kwargs).arguments)


@cache
def _signature(function: Any) -> inspect.Signature | None:
    likes = get_testing_overrides()
    return inspect.signature(likes[function]) if function in likes else None
