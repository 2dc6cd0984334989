"""Names the sub-layers of a traced layer, and the hidden states in them, by dataflow alone.

A layer carries a residual stream. Each sum of the stream and of something computed with Linears is a sub-layer: what is
added is its `h`, what it is added to its `res`. A sub-layer with an attention call in it is `attn` (`cross` where keys come from
another input than queries), any other is `ffn`. No module names are looked at.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx, nn

from peftc.tracing import graphs
from peftc.tracing.sites import Slice


@dataclass(frozen=True)
class Projection:
    """A Linear in a role: the node that calls it, and the rows of its output that play the role."""

    node: fx.Node
    rows: Slice | None = None


@dataclass
class SubLayer:
    kind: Literal["attn", "ffn"]
    variant: Literal["self", "cross", ""]
    h: fx.Node
    res: fx.Node
    add: fx.Node
    body: set[fx.Node] = field(repr=False)
    x: fx.Node | None = None
    context: fx.Node | None = None
    attention: fx.Node | None = None
    hidden: fx.Node | None = None
    projections: dict[str, Projection] = field(default_factory=dict[str, Projection])
    norms: list[fx.Node] = field(default_factory=list[fx.Node])
    output_norm: fx.Node | None = None  # the post-norm: what `norm(...)` means first


def sub_layers(graph: fx.Graph, root: nn.Module) -> list[SubLayer]:
    """The sub-layers of a layer in the order of its residual stream."""
    stream = stream_input(graph)
    found: list[SubLayer] = []
    if stream is None:
        return found
    for node in graph.nodes:
        if not graphs.is_add(node) or not graphs.is_tensor(node):
            continue
        sub = sub_layer_at(node, stream, root)
        if sub is not None:
            found.append(sub)
            stream = node
    claimed: set[fx.Node] = set()
    for sub in found:
        find_norms(sub, root, claimed)
        claimed.update(sub.norms)
    return found


def stream_input(graph: fx.Graph) -> fx.Node | None:
    """The layer's hidden state: its first floating tensor argument."""
    for node in graph.nodes:
        value = graphs.example(node)
        if node.op == "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point():
            return node
    return None


def is_stream(node: fx.Node, stream: fx.Node, root: nn.Module) -> bool:
    """Whether `node` is the stream itself, but for norms, dropout, casts and clamps."""
    while node is not stream:
        before = graphs.passes_through(node, root)
        if before is None and graphs.is_norm(node, root):
            before = graphs.first_input(node)
        if before is None:
            return False
        node = before
    return True


def sub_layer_at(add: fx.Node, stream: fx.Node, root: nn.Module) -> SubLayer | None:
    operands = [a for a in add.args[:2] if isinstance(a, fx.Node) and graphs.is_tensor(a)]
    if len(operands) != 2:
        return None
    for res, h in (operands, operands[::-1]):
        if not is_stream(res, stream, root) or is_stream(h, stream, root):
            continue
        body = set(graphs.upstream(h, lambda n: is_stream(n, stream, root)))
        if stream not in body and not any(is_stream(n, stream, root) for n in body):
            continue
        if any(graphs.is_linear(n, root) for n in body):
            return described(add, res, h, body, root)
    return None


def described(add: fx.Node, res: fx.Node, h: fx.Node, body: set[fx.Node], root: nn.Module) -> SubLayer | None:
    attention = next((n for n in add.graph.nodes if n in body and graphs.is_attention(n)), None)
    if attention is not None:
        return attention_roles(SubLayer("attn", "self", h, res, add, body, attention=attention), root)
    return ffn_roles(SubLayer("ffn", "", h, res, add, body), root)


def attention_roles(sub: SubLayer, root: nn.Module) -> SubLayer:
    assert sub.attention is not None
    q, k, v = sub.attention.args[2:5]
    for name, value in (("q", q), ("k", k), ("v", v)):
        feeders = graphs.feeding(value, root) if isinstance(value, fx.Node) else []
        if len(feeders) == 1:
            sub.projections[name] = Projection(*feeders[0])
    out = graphs.fed(sub.attention, root, sub.body)
    if out is not None:
        sub.projections["o"] = Projection(out)
    if "q" in sub.projections:
        sub.x = graphs.first_input(sub.projections["q"].node)
    if "k" in sub.projections:
        sub.context = graphs.first_input(sub.projections["k"].node)
    if (
        sub.x is not None
        and sub.context is not None
        and graphs.stripped(sub.x, root) is not graphs.stripped(sub.context, root)
    ):
        sub.variant = "cross"
    return sub


def ffn_roles(sub: SubLayer, root: nn.Module) -> SubLayer | None:
    downs = graphs.feeding(sub.h, root)
    if len(downs) != 1:
        return sub
    down = downs[0][0]
    sub.projections["down"] = Projection(*downs[0])
    sub.hidden = graphs.first_input(down)
    if sub.hidden is None:
        return sub
    product = graphs.stripped(sub.hidden, root)
    if product.target in (operator.mul, torch.mul) and len(product.all_input_nodes) == 2:
        name_gated(sub, product, root)
    ups = [p for p in graphs.feeding(sub.hidden, root) if p[0] not in {q.node for q in sub.projections.values()}]
    if len(ups) == 1 and "up" not in sub.projections:
        sub.projections["up"] = Projection(*ups[0])
    first = sub.projections.get("up") or sub.projections.get("gate") or sub.projections["down"]
    sub.x = graphs.first_input(first.node)
    return sub


def name_gated(sub: SubLayer, product: fx.Node, root: nn.Module) -> None:
    """z = act(gate(x)) * up(x): `up` reaches the product untouched, `gate` through the activation."""
    feeders = [(operand, graphs.feeding(operand, root)) for operand in product.all_input_nodes]
    if any(len(found) != 1 for _, found in feeders):
        return
    for operand, found in feeders:
        source = graphs.stripped(operand, root)
        direct = source is found[0][0] or graphs.slice_of_last_dimension(source) is not None
        sub.projections["up" if direct else "gate"] = Projection(*found[0])


def find_norms(sub: SubLayer, root: nn.Module, claimed: set[fx.Node]) -> None:
    """The norms of a sub-layer: before its Linears, between its last Linear and the sum, and right after the sum."""
    for node in sub.add.graph.nodes:
        if node in sub.body and node not in claimed and graphs.is_norm(node, root):
            sub.norms.append(node)
    users = tensor_users(sub.add)
    while len(users) == 1 and graphs.passes_through(users[0], root) is not None:
        users = tensor_users(users[0])
    if len(users) == 1 and graphs.is_norm(users[0], root):
        sub.output_norm = users[0]
        sub.norms.append(users[0])


def tensor_users(node: fx.Node) -> list[fx.Node]:
    return [u for u in node.users if not graphs.is_size(u) and graphs.is_tensor(u)]
