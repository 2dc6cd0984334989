"""Attentions side by side that are heads of one, each with Linears of its own."""

from collections.abc import Mapping, Sequence

from peftc.dataflow.features import source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import shape
from peftc.dataflow.values import reaches
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.ffn import Projection

Roles = Mapping[str, Projection]


def heads_beside(attentions: Sequence[Attention], roles: Roles, layer: LayerGraph) -> list[dict[str, Projection]]:
    """The roles of each further attention, if all are heads of one: each has Linears of its own, as
    wide as those of the first, and reads what the first reads. `roles`: of the first.
    """
    # Seen in: no transformers model, but heads in an `nn.ModuleList`
    first, *others = attentions
    if not others or set(roles) != {"q", "k", "v"} or any(reaches(first.call, a.call) for a in others):
        return []
    heads = [_roles_of(attention, layer) for attention in others]
    nodes = {p.node for head in (roles, *heads) for p in head.values()}
    are_alike = all(_is_like(head, roles, layer) for head in heads)
    return heads if are_alike and len(nodes) == 3 * len(attentions) else []


def _roles_of(attention: Attention, layer: LayerGraph) -> dict[str, Projection]:
    values = {"q": attention.q, "k": attention.k, "v": attention.v}
    sources = {role: source_linears(layer, value) for role, value in values.items()}
    return {role: Projection(*linears[0]) for role, linears in sources.items() if len(linears) == 1}


def _is_like(head: Roles, first: Roles, layer: LayerGraph) -> bool:
    """Whether two heads have the same roles, with Linears of the same sizes and inputs."""
    if set(head) != set(first):
        return False
    pairs = [(head[role].node, first[role].node) for role in head]
    return all(shape(a) == shape(b) and layer.input_of(a) is layer.input_of(b) for a, b in pairs)
