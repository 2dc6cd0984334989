"""Which Linears compute the queries, keys and values of attentions, where several may."""

import math
from collections.abc import Collection, Mapping

from torch import fx

from peftc.dataflow.einsum import einsum_labels, is_einsum
from peftc.dataflow.features import is_only_layout, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import shape
from peftc.dataflow.operations import Op, op_of
from peftc.dataflow.values import upstream, value_operands, value_users
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.ffn import Projection
from peftc.recognition.module_features import reads_patches
from peftc.recognition.residual_stream import Stream
from peftc.recognition.token_mixing import is_weighted


def attention_projections(
    attentions: list[Attention], body: Collection[fx.Node], ends: Collection[fx.Node], stream: Stream
) -> dict[str, Projection]:
    """The Linears of queries, keys and values: `q`, `k`, `v`, those that are known.

    Args: `attentions`: of one sub-layer. `body`: the nodes that may compute them. `ends`: nodes
    behind which nothing does.
    """
    layer, projections = stream.layer, dict[str, Projection]()
    values = {r: [getattr(a, r) for a in attentions] for r in ("q", "k")}
    # Seen in: no transformers model, but DeepSeek's own code: features with positions are apart
    for q, k in (pair for a in attentions for pair in a.other_pairs):
        values["q"].append(q)
        values["k"].append(k)
    values["v"] = [a.v for a in outermost(attentions, layer)]
    nearest: dict[str, list[fx.Node]] = {}
    for role, (value, *others) in values.items():
        sources = source_linears(layer, value, ends=ends)
        linears = [n for n, _ in sources if n in body]
        if any(stream.hides(n) for n in upstream(value, layer.is_linear) if n in body):
            linears = []  # an opaque module may change a Linear's result, or replace it
        last = [n for n in linears if not any(n in nodes_up_to_linears(other, layer) for other in linears)]
        # not the Linears that compute positions
        nearest[role] = list(filter(stream.reaches, last)) or last
        rows = dict(source_linears(layer, value, *others, ends=ends) if others else sources)
        if (node := next(iter(nearest[role]), None)) is not None and node in rows:
            projections[role] = Projection(node, rows[node])
        elif not linears and (node := patch_convolution(value, body, layer)) is not None:
            projections[role] = Projection(node)
    without_rows_of_keys(projections, attentions[0], layer)
    for role in roles_with_equal_linears(nearest):
        projections.pop(role, None)
        same_size = [n for n in nearest[role] if math.prod(shape(n)) == math.prod(shape(values[role][0]))]
        if len(same_size) == 1:  # more heads of queries than of keys
            projections[role] = Projection(same_size[0])
    for role in roles_with_overlapping_rows(projections, attentions[0], layer):
        del projections[role]
    for role in roles_by_other_weights(projections, attentions[0], layer):
        del projections[role]
    return projections


def output_linear(attentions: list[Attention], body: set[fx.Node], layer: LayerGraph) -> fx.Node | None:
    """The Linear that reads the result of attentions, and computes no queries, keys or values of
    one behind it.
    """
    # Seen in: no transformers model, but MotionBERT: joints, then frames, with the same Linear
    first, *others = attentions
    out = layer.consumer_linear(first.out, body)
    for other in sorted(others, key=lambda a: a.call):
        operands = (other.q, other.k, other.v)
        if out is not None and any(out in upstream(value, layer.is_linear) for value in operands):
            out = layer.consumer_linear(other.out, body)
    return out


def patch_convolution(value: fx.Node, body: Collection[fx.Node], layer: LayerGraph) -> fx.Node | None:
    """The convolution by a kernel that alone computes a value, but for its layout."""
    # Seen in: no transformers model, but ScalableViT, whose keys are those of patches
    behind = upstream(value, lambda n: n not in body or reads_patches(layer.module(n)))
    convolutions = [n for n in behind if reads_patches(layer.module(n))]
    alone = len(convolutions) == 1 and is_only_layout(value, convolutions[0], layer)
    return convolutions[0] if alone else None


def outermost(attentions: list[Attention], layer: LayerGraph) -> list[Attention]:
    """The attentions whose values are no probabilities of another one, or products of these."""
    # Seen in: no transformers model, but Nystrom attention
    softmaxes = {a.call for a in attentions if a.sort == "written"}
    own = [a for a in attentions if softmaxes.isdisjoint(upstream(a.v, layer.is_linear))]
    return own or attentions


def without_sorting(attentions: list[Attention], layer: LayerGraph) -> list[Attention]:
    """The attentions that do not compute keys of another one: such an attention sorts tokens."""
    # Seen in: no transformers model, but Sinkhorn attention, whose `v` would be its keys without it
    keys = {n for a in attentions for n in upstream(a.k, layer.is_linear)}
    return [a for a in attentions if a.out not in keys] or attentions


def without_rows_of_keys(projections: dict[str, Projection], attention: Attention, layer: LayerGraph) -> None:
    """Removes the keys' rows from those of the values, where keys are joined to the values."""
    # Seen in: no transformers model, but Sinkhorn attention: sorted keys are beside its values
    keys, values = projections.get("k"), projections.get("v")
    if keys is None or values is None or keys.node is not values.node:
        return
    width = layer.width(keys.node)
    sources = [dict(source_linears(layer, operand)).get(values.node) for operand in joined_operands(attention.v, layer)]
    own = [rows for rows in sources if rows is not None and not rows.overlaps(keys.slice(width))]
    if len(set(own)) == 1:
        projections["v"] = Projection(values.node, own[0])


def joined_operands(value: fx.Node, layer: LayerGraph) -> list[fx.Node]:
    """The tensors whose tokens a value joins; none where it joins none."""
    nodes, operands = [value], list[fx.Node]()
    for node in nodes:  # which grows
        if layer.op(node) is Op.JOIN and len({shape(n)[-1:] for n in [node, *value_operands(node)]}) == 1:
            operands += value_operands(node)
        elif not layer.is_linear(node):
            nodes += [n for n in value_operands(node) if n not in nodes and shape(n)]
    return operands


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
    # Seen in: no transformers model, but Nyström attention, which adds a convolution of its values,
    # and Set Transformer, which adds the attention to its queries
    operands = [operand for a in attentions for operand in (a.q, a.k, a.v)]
    linears = {linear for operand in operands for linear in layer.linears(set(upstream(operand, layer.is_linear)))}
    return not linears.isdisjoint(upstream(value, layer.is_linear))


def roles_by_other_weights(projections: Mapping[str, Projection], attention: Attention, layer: LayerGraph) -> list[str]:
    """The roles that share rows with another, and differ from it by weights behind them."""
    # Seen in: no transformers model, but xLSTM (matrices of each few features, which are no Linear)
    roles: list[str] = []
    for role, one in projections.items():
        rows = one.slice(layer.width(one.node))
        others = [p for name, p in projections.items() if name != role and p.node is one.node]
        between = upstream(getattr(attention, role), lambda n, linear=one.node: n is linear)
        is_own = any(is_weighted(n, layer) and not _is_by_entry(n) for n in between if n is not one.node)
        if is_own and any(rows.overlaps(other.slice(layer.width(other.node))) for other in others):
            roles.append(role)
    return roles


def _is_by_entry(parameter: fx.Node) -> bool:
    """Whether all that reads a parameter scales by its entries or adds them, without a sum."""
    # Seen in: no transformers model, but gated attention units (FLASH)
    users = value_users(parameter)
    sums = [set("".join(labels)) - set(result) for n in users if is_einsum(n) for labels, result in (einsum_labels(n),)]
    return bool(users) and all(op_of(n) in (Op.MUL, Op.ADD) or is_einsum(n) for n in users) and not any(sums)


def nodes_up_to_linears(linear: fx.Node, layer: LayerGraph) -> set[fx.Node]:
    """The nodes that a Linear's input is computed from, back to the Linears before it."""
    # Seen in: MiniCPM 3, GLM-4 MoE Lite, LongCat
    source = layer.input_of(linear)
    return set() if source is None else set(upstream(source, layer.is_linear))


def q_width(projections: Mapping[str, Projection], layer: LayerGraph) -> int | None:
    """The features of the queries' Linear."""
    query = projections.get("q")
    return None if query is None else query.slice(layer.width(query.node)).width
