"""Which Linears compute the queries, keys and values of attentions, where several may."""

import math
from collections.abc import Mapping

from torch import fx

from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import shape
from peftc.dataflow.values import upstream
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.ffn import Projection


def outermost(attentions: list[Attention], layer: LayerGraph) -> list[Attention]:
    """The attentions whose values are no probabilities of another one, or products of these."""
    # Seen in: no transformers model, but Nystrom attention
    softmaxes = {a.call for a in attentions if a.sort == "written"}
    own = [a for a in attentions if softmaxes.isdisjoint(upstream(a.v, layer.is_linear))]
    return own or attentions


def roles_with_equal_linears(nearest: Mapping[str, list[fx.Node]]) -> set[str]:
    """The roles computed by the same Linears as `q`, if several. `k` and `v` may be one value."""
    # Seen in: ZAYA. Without it, its keys would have no role
    same = {role for role in ("k", "v") if len(nearest["q"]) > 1 and set(nearest[role]) == set(nearest["q"])}
    return {"q", *same} if same else same


def roles_with_overlapping_rows(
    projections: Mapping[str, Projection], attention: Attention, layer: LayerGraph
) -> list[str]:
    """The roles that share rows with another, and have more rows than the attention reads."""
    # Seen in: rotations of queries and keys in one tensor; a wrong role would be trained
    roles: list[str] = []
    for role, one in projections.items():
        others = [p for name, p in projections.items() if name != role and p.node is one.node]
        size = math.prod(shape(getattr(attention, role)))
        width = layer.width(one.node)
        rows = one.slice(width)
        is_larger = size < math.prod(shape(one.node)) // width * rows.width
        if is_larger and any(rows.overlaps(other.slice(width)) for other in others):
            roles.append(role)
    return roles


def reads_projections(value: fx.Node, attentions: list[Attention], layer: LayerGraph) -> bool:
    """Whether a value is computed from the Linears of an attention: then it is a part of it."""
    # Seen in: no transformers model, but Nyström attention, which adds a convolution of its values
    operands = [operand for a in attentions for operand in (a.q, a.k, a.v)]
    linears = {linear for operand in operands for linear in layer.linears(set(upstream(operand, layer.is_linear)))}
    return not linears.isdisjoint(upstream(value, layer.is_linear))


def nodes_up_to_linears(linear: fx.Node, layer: LayerGraph) -> set[fx.Node]:
    """The nodes that a Linear's input is computed from, back to the Linears before it."""
    # Seen in: MiniCPM 3, GLM-4 MoE Lite, LongCat
    source = layer.input_of(linear)
    return set() if source is None else set(upstream(source, layer.is_linear))
