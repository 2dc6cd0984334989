"""What an attention has beside it: heads of one attention with Linears of their own, tokens that
join those of the stream, and a feed-forward network whose hidden features join the result.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from peftc.dataflow.features import is_affine, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import is_tensor, shape
from peftc.dataflow.operations import Op
from peftc.dataflow.values import reaches, upstream, value_operands
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.attention.projections import joined_operands
from peftc.recognition.ffn import Projection, input_projections

Roles = Mapping[str, Projection]


def heads_beside(attentions: Sequence[Attention], roles: Roles, layer: LayerGraph) -> list[dict[str, Projection]]:
    """The roles of each further attention, if all are heads of one: each has Linears of its own, as
    wide as those of the first, and reads what the first reads. Or all have the same queries, and
    keys and values of contexts of their own. `roles`: of the first.
    """
    # Seen in: no transformers model, but heads in an `nn.ModuleList`
    first, *others = attentions
    if not others or set(roles) != {"q", "k", "v"} or any(reaches(first.call, a.call) for a in others):
        return []
    heads = [_roles_of(attention, layer) for attention in others]
    nodes = {p.node for head in (roles, *heads) for p in head.values()}
    if all(_has_queries_of(head, roles) for head in heads) and len(nodes) == 1 + 2 * len(attentions):
        return [{role: one for role, one in head.items() if role != "q"} for head in heads]
    are_alike = all(_is_like(head, roles, layer) for head in heads)
    return heads if are_alike and len(nodes) == 3 * len(attentions) else []


def _roles_of(attention: Attention, layer: LayerGraph) -> dict[str, Projection]:
    values = {"q": attention.q, "k": attention.k, "v": attention.v}
    sources = {role: source_linears(layer, value) for role, value in values.items()}
    return {role: Projection(*linears[0]) for role, linears in sources.items() if len(linears) == 1}


def _has_queries_of(head: Roles, first: Roles) -> bool:
    """Whether two attentions have the same queries, and keys and values of the same widths."""
    # Seen in: no transformers model, but an image beside the text in Wan, and IP-Adapter
    if set(head) != set(first) or head["q"] != first["q"]:
        return False
    return all(shape(head[role].node)[-1:] == shape(first[role].node)[-1:] for role in ("k", "v"))


def _is_like(head: Roles, first: Roles, layer: LayerGraph) -> bool:
    """Whether two heads have the same roles, with Linears of the same sizes and inputs."""
    if set(head) != set(first):
        return False
    pairs = [(head[role].node, first[role].node) for role in head]
    return all(shape(a) == shape(b) and layer.input_of(a) is layer.input_of(b) for a, b in pairs)


def joined_beside(
    attentions: Sequence[Attention], roles: Roles, layer: LayerGraph, own: Collection[fx.Node]
) -> list[dict[str, Projection]]:
    """The roles of tokens that join those of the stream in an attention, if other Linears compute
    them. `roles`: of the stream. `own`: the nodes of the sub-layer.
    """
    # Seen in: no transformers model, but the text in the last layer of Stable Diffusion 3
    others: dict[str, list[Projection]] = {}
    attention, *more = attentions
    for role, value in (("q", attention.q), ("k", attention.k), ("v", attention.v)) if not more else ():
        sources = [source_linears(layer, operand) for operand in joined_operands(value, layer)]
        single = {linears[0][0]: Projection(*linears[0]) for linears in sources if len(linears) == 1}
        first = roles[role].node if role in roles else None
        if first is not None and single.pop(first, None) is not None:  # one module may compute both
            others[role] = [p for node, p in single.items() if node in own and node.target != first.target]
    count = max(map(len, others.values()), default=0)
    return [{role: beside[i] for role, beside in others.items() if i < len(beside)} for i in range(count)]


def feed_forward_beside(
    out: fx.Node, attentions: Sequence[Attention], layer: LayerGraph
) -> tuple[fx.Node, dict[str, Projection]] | None:
    """The hidden features of a network that join the result of attentions before one Linear, and
    what computes them: that Linear is the output projection of both, and of none alone.
    """
    # Seen in: no transformers model, but the single blocks of Flux
    source = layer.input_of(out)
    join = None if source is None else layer.stripped(source)
    operands = value_operands(join) if join is not None and layer.op(join) is Op.JOIN else []
    hidden = [n for n in operands if not any(reaches(a.call, n) for a in attentions)]
    if len(hidden) != 1 or len(operands) == 1:
        return None
    inputs = input_projections(hidden[0], layer)
    is_activated = any(not is_affine(hidden[0], p.node, layer) for p in inputs.values())
    return (hidden[0], inputs) if is_activated else None


def joint_states(
    x: fx.Node | None, h: fx.Node, other_h: fx.Node, roles: Roles, others: Roles, layer: LayerGraph
) -> tuple[fx.Node | None, fx.Node]:
    """`x` and `h` of all tokens, where one Linear computes what is added to two streams. `roles`,
    `others`: of the sub-layer as it is seen from each of them.
    """
    # Seen in: no transformers model, but CogVideoX
    first, last = roles.get("q") or roles.get("up"), roles.get("o") or roles.get("down")
    if first is None or last is None or last not in others.values():
        return x, h
    common = {*upstream(h)}.intersection(upstream(other_h))
    return layer.input_of(first.node), max(n for n in common if is_tensor(n) and reaches(last.node, n))
