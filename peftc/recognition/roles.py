"""Names the sub-layers of a traced layer, and the hidden states in them, by dataflow alone.

A layer carries a residual stream. Each sum of the stream and of something computed from it, with weights or by mixing tokens,
is a sub-layer: what is added is its `h`, what it is added to its `res`. A sub-layer with an attention in it is `attn` (`cross` where its keys do not
come from the stream), one that mixes tokens in another way is `mixer`, any other is `ffn`. One that is computed by a module
whose code could not be followed has none of these names. Two that read one stream and are
summed before they are added to it (parallel blocks) are two sub-layers. No module names are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.recognition import ffn
from peftc.recognition.attention.patterns import Attention, attentions, is_softmax, mixed
from peftc.recognition.ffn import Projection
from peftc.recognition.graph import features, nodes
from peftc.recognition.graph.value_operands import value_operands, value_users
from peftc.recognition.hyper_connections import single
from peftc.recognition.moe.listed import Listed
from peftc.recognition.moe.router import Router
from peftc.recognition.moe.stacked import Experts
from peftc.recognition.residual_stream import Stream, stream_input
from peftc.recognition.token_mixing import made_of_weights, mixes, mixes_neighbours, mixing, weighted
from peftc.recognition.token_mixing_linears import mixed_by_linears


@dataclass
class SubLayer:
    kind: Literal["attn", "ffn", "mixer", "unread"]
    variant: Literal["self", "cross", ""]
    h: fx.Node
    res: fx.Node
    add: fx.Node
    body: set[fx.Node] = field(repr=False)
    x: fx.Node | None = None
    context: fx.Node | None = None
    attentions: list[Attention] = field(default_factory=list[Attention])
    hidden: fx.Node | None = None
    projections: dict[str, Projection] = field(default_factory=dict[str, Projection])
    linears: list[fx.Node] = field(default_factory=list[fx.Node])  # those without a role
    norms: list[fx.Node] = field(default_factory=list[fx.Node])
    output_norm: fx.Node | None = None  # the post-norm: what `norm(...)` means first
    experts: list[Experts | Listed] = field(default_factory=list["Experts | Listed"])
    router: Router | None = None
    shared: list[dict[str, Projection]] = field(default_factory=list[dict[str, Projection]])  # beside the experts

    @property
    def attention(self) -> Attention | None:
        """Its attention, the first where it is made of several."""
        return self.attentions[0] if self.attentions else None


def sub_layers(graph: fx.Graph, root: nn.Module, opaque: Collection[str] = ()) -> list[SubLayer]:
    """The sub-layers of a layer in the order of its residual stream. `opaque`: modules whose code could not be followed."""
    first = stream_input(graph)
    if first is None:
        return []
    stream, inside = Stream(first, root, opaque), attentions(graph, root)
    found = along(graph, stream, inside, root)
    if not found and (begin := stream_replacement(graph, stream, inside)) is not None:
        attending = described(begin, first, begin, stream, inside, root)
        stream.values.append(begin)
        found = [attending, *along(graph, stream, inside, root)]
    if len(found) > 1 and not any(s.kind == "ffn" for s in found) and found[-1].kind == "mixer":
        last_that_mixes(found[-1], stream, root)
    claimed: set[fx.Node] = set()
    for sub in found:
        find_norms(sub, root, claimed)
        claimed.update(sub.norms)
    return found


def along(graph: fx.Graph, stream: Stream, inside: list[Attention], root: nn.Module) -> list[SubLayer]:
    """What is added to the stream, one after the other. The sums become part of it."""
    found: list[SubLayer] = []
    for node in graph.nodes:
        if nodes.is_add(node) and nodes.is_tensor(node):
            made = summed(node, stream, inside, root)
            found += [inner for sub in made for inner in bottleneck_sublayers(sub, stream, inside, root) or [sub]]
            if made or carried(node, stream, root):
                stream.values.append(node)
    return found


def stream_replacement(graph: fx.Graph, stream: Stream, inside: list[Attention]) -> fx.Node | None:
    """The result of an attention that is not added to the stream but takes its place: the last sum is one of it and of what
    is made from it.
    """
    for add in reversed([n for n in graph.nodes if nodes.is_add(n) and nodes.is_tensor(n)]):
        operands = [a for a in add.args[:2] if isinstance(a, fx.Node) and nodes.is_tensor(a)]
        for begin, other in itertools.permutations(operands, 2):
            behind = set(nodes.upstream(other, lambda n, begin=begin: n is begin))
            if begin in behind and any(a.call in stream.body(begin) for a in inside):
                return begin
    return None


def last_that_mixes(sub: SubLayer, stream: Stream, root: nn.Module) -> None:
    """The last sub-layer of a layer without a feed-forward one is that, if it mixes but neighbouring tokens."""
    if mixes_neighbours(sub.body, stream, root):
        sub.kind = "ffn"
        ffn_roles(sub, root)
        played = {p.node for p in sub.projections.values()}
        sub.linears = [n for n in sub.linears if n not in played]


def summed(add: fx.Node, stream: Stream, inside: list[Attention], root: nn.Module) -> list[SubLayer]:
    """What a sum adds to the stream: nothing, one sub-layer, or two in parallel."""
    operands = [a for a in add.args[:2] if isinstance(a, fx.Node) and nodes.is_tensor(a)]
    if len(operands) != 2:
        return []
    for res, h in (operands, operands[::-1]):
        if (
            stream.holds(res)
            and not stream.holds(h)
            and not mixes_hyper_connections(h, stream, root)
            and computed(h, stream, root)
        ):
            h = single(h)
            parts = parallel(h, stream, inside, root)
            if not parts and (out := serial_attention_output(h, stream, inside, root)) is not None:
                first = described(add, res, out, stream, inside, root)
                stream.values.append(out)
                return [first, described(add, res, last_of_chain(h, root), stream, inside, root)]
            return [described(add, res, part, stream, inside, root) for part in parts or [h]]
    return []


def bottleneck_sublayers(sub: SubLayer, stream: Stream, inside: list[Attention], root: nn.Module) -> list[SubLayer]:
    """The sub-layers of a stream of its own inside what looks like one that attends (a bottleneck); none where it has fewer
    than two. That stream begins with what the first result of an attention is added to.
    """
    if sub.attention is None:
        return []
    call = sub.attention.call
    adds = sorted(n for n in sub.body if nodes.is_add(n) and nodes.is_tensor(n))
    found: list[SubLayer] = []
    for add in adds:
        before = [a for a in add.args[:2] if nodes.shape(a) == nodes.shape(add)]
        start = [a for a in before if isinstance(a, fx.Node) and call not in nodes.upstream(a, lambda n: n is call)]
        if len(before) == 2 and len(start) == 1:
            inner = Stream(start[0], root, stream.opaque)
            inner.values += stream.values
            for node in (n for n in adds if n >= add):
                if made := summed(node, inner, inside, root):
                    found += made
                    inner.values.append(node)
            break
    return found if len(found) > 1 else []


def carried(add: fx.Node, stream: Stream, root: nn.Module) -> bool:
    """Whether a sum is of the stream and the stream, of the stream and a mixture of its copies, or of the stream and what
    does not depend on it.
    """
    operands = [a for a in add.args[:2] if isinstance(a, fx.Node)]
    held = [a for a in operands if stream.holds(a)]
    others = [a for a in operands if a not in held]
    return (
        len(operands) == 2
        and len(held) > 0
        and all(mixes_hyper_connections(a, stream, root) or not stream.reaches(a) for a in others)
    )


def mixes_hyper_connections(h: fx.Node, stream: Stream, root: nn.Module) -> bool:
    """Whether a value mixes the copies that a stream of four dimensions has: nothing with weights, which make its
    coefficients at most, stands on the way to it.
    """
    if len(nodes.shape(h)) != 4 or stream.holds(h):
        return False

    def stop(n: fx.Node) -> bool:
        return stream.holds(n) or weighted(n, root) or any(made_of_weights(i, root) for i in value_operands(n))

    held = filter(stream.holds, nodes.upstream(h, stop))
    return any(nodes.shape(n)[-1:] == nodes.shape(h)[-1:] for n in held)


def computed(h: fx.Node, stream: Stream, root: nn.Module) -> bool:
    """Whether a value is made from the stream, with weights or by mixing tokens."""
    body = stream.body(h)
    with_weights = any(weighted(n, root) for n in body if not nodes.is_norm(n, root))
    return any(map(stream.holds, body)) and (
        with_weights or (mixes(body, stream, root) and not mixes_neighbours(body, stream, root))
    )


def parallel(h: fx.Node, stream: Stream, inside: list[Attention], root: nn.Module) -> list[fx.Node]:
    """The two summands of a value one of which attends and the other does not."""
    total = nodes.stripped(h, root)
    operands = [a for a in total.args[:2] if isinstance(a, fx.Node)] if nodes.is_add(total) else []
    if len(operands) != 2 or not all(computed(o, stream, root) for o in operands):
        return []
    bodies = [stream.body(o) for o in operands]
    attends = [any(a.call in body for a in inside) for body in bodies]
    return operands if attends[0] != attends[1] else []


def serial_attention_output(h: fx.Node, stream: Stream, inside: list[Attention], root: nn.Module) -> fx.Node | None:
    """The result of an attention, or of convolutions, that a feed-forward block of the same sub-layer alone reads, without a
    sum in between.
    """
    body = stream.body(h)
    out = next((nodes.consumer_linear(a.out, root, body) for a in inside if a.call in body), None)
    if out is None and mixes_neighbours(body, stream, root):
        out = max((n for n in body if not stream.holds(n) and mixing(n, root)), default=None)
    behind = set(nodes.upstream(h, lambda n: n is out)) - {out}
    if out is None or any(map(stream.holds, behind)) or sum(nodes.is_linear(n, root) for n in behind) < 2:
        return None
    return out


def last_of_chain(h: fx.Node, root: nn.Module) -> fx.Node:
    """The result of the first of the Linears that follow each other at the end."""
    node = nodes.stripped(h, root)
    while nodes.is_linear(node, root) and (source := nodes.first_input(node)) is not None:
        before = nodes.stripped(source, root)
        if not nodes.is_linear(before, root):
            return node
        node = before
    return h


def described(
    add: fx.Node, res: fx.Node, h: fx.Node, stream: Stream, inside: list[Attention], root: nn.Module
) -> SubLayer:
    body = stream.body(h)
    own = [a for a in inside if a.call in body]
    sub = SubLayer("ffn", "", h, res, add, body, x=stream.entry(body, root), attentions=own)
    if own:
        attention_roles(sub, own, stream, root)
    elif any(stream.hides(n) for n in body):
        sub.kind = "unread"
    elif mixes(body, stream, root) or mixed_by_linears(body, stream, root):
        sub.kind = "unread" if attends(body, root) else "mixer"
    else:
        ffn_roles(sub, root)
    played = {p.node for p in sub.projections.values()}
    sub.linears = sorted(n for n in body if nodes.is_linear(n, root) and n not in played)
    return sub


def attends(body: set[fx.Node], root: nn.Module) -> bool:
    """Whether a softmax is multiplied with an activation, as in an attention."""
    return any(is_softmax(n, root) and any(mixed(n)) for n in body)


def attention_roles(sub: SubLayer, own: list[Attention], stream: Stream, root: nn.Module) -> None:
    sub.kind, sub.variant = "attn", "self"
    attention, values = own[0], {role: [getattr(a, role) for a in own] for role in ("q", "k", "v")}
    nearest: dict[str, list[fx.Node]] = {}
    for name, (value, *others) in values.items():
        near = [f[0] for f in features.source_linears(value, root) if f[0] in sub.body]
        if any(stream.hides(n) for n in nodes.upstream(value, lambda n: nodes.is_linear(n, root)) if n in sub.body):
            near = []  # what an opaque module does to a Linear's result, or has instead of it, is not known
        first = [n for n in near if not any(n in made_of(other, root) for other in near)]
        nearest[name] = list(filter(stream.reaches, first)) or first  # not what positions are made of
        rows = dict(features.source_linears(value, root, *others))
        node = next(iter(nearest[name]), None)  # the nearest: of a latent, what is made from it
        if node is not None and node in rows:
            sub.projections[name] = Projection(node, rows[node])
    for name in entangled(nearest):
        sub.projections.pop(name, None)
        alike = [n for n in nearest[name] if math.prod(nodes.shape(n)) == math.prod(nodes.shape(values[name][0]))]
        if len(alike) == 1:  # the only one with as many features: more heads of queries than of keys
            sub.projections[name] = Projection(alike[0])
    for role in confused(sub.projections, attention):
        del sub.projections[role]
    out = nodes.consumer_linear(attention.out, root, sub.body)
    if out is not None and attention.out in sub.body:
        sub.projections["o"] = Projection(out)
    if not stream.reaches(attention.k):
        sub.variant = "cross"
    sub.x = own_input(sub.projections.get("q"), sub.x, stream)
    sub.context = sub.x
    if sub.variant == "cross" and "k" in sub.projections:
        sub.context = nodes.first_input(sub.projections["k"].node)
    elif "k" in sub.projections:
        sub.context = own_input(sub.projections["k"], sub.x, stream)


def entangled(nearest: Mapping[str, list[fx.Node]]) -> set[str]:
    """The roles whose values are made of the same several Linears as queries are: which of these is whose cannot be told.

    Keys and values may be one value, made of several.
    """
    same = {role for role in ("k", "v") if len(nearest["q"]) > 1 and set(nearest[role]) == set(nearest["q"])}
    return {"q", *same} if same else same


def confused(projections: Mapping[str, Projection], attention: Attention) -> list[str]:
    """The roles that have rows in common with another one, and more of them than go there: which rows are whose could not be
    followed.
    """
    found: list[str] = []
    for role, one in projections.items():
        shared = any(overlap(one, other) for name, other in projections.items() if name != role)
        taken = math.prod(nodes.shape(getattr(attention, role)))
        if shared and taken < math.prod(nodes.shape(one.node)[:-1]) * span(one).width:
            found.append(role)
    return found


def overlap(one: Projection, other: Projection) -> bool:
    return one.node is other.node and span(one).overlaps(span(other))


def span(projection: Projection) -> Slice:
    return projection.rows or Slice(0, nodes.shape(projection.node)[-1])


def made_of(linear: fx.Node, root: nn.Module) -> set[fx.Node]:
    """The Linears before a Linear, as far as the next ones."""
    source = nodes.first_input(linear)
    return set() if source is None else set(nodes.upstream(source, lambda n: nodes.is_linear(n, root)))


def own_input(projection: Projection | None, entry: fx.Node | None, stream: Stream) -> fx.Node | None:
    """What a Linear reads, where that is the stream itself; else where the sub-layer begins."""
    first = nodes.first_input(projection.node) if projection is not None else None
    return first if first is not None and (stream.holds(first) or entry is None) else entry


def ffn_roles(sub: SubLayer, root: nn.Module) -> None:
    downs = features.source_linears(sub.h, root)
    if len(downs) != 1 or not features.blockless(sub.h, downs[0][0], root):
        return
    down = downs[0][0]
    hidden = nodes.first_input(down)
    if hidden is None:
        return
    sub.projections, sub.hidden = {"down": Projection(*downs[0])}, hidden
    made = ffn.before(hidden, root)
    sub.projections |= {role: p for role, p in made.items() if p.node in sub.body}  # not what made the stream
    first = sub.projections.get("up") or sub.projections.get("gate")
    sub.x = nodes.first_input(first.node) if first is not None else sub.x


def find_norms(sub: SubLayer, root: nn.Module, claimed: set[fx.Node]) -> None:
    """The norms of a sub-layer: before its Linears, between its last Linear and the sum, and right after the sum."""
    for node in sub.add.graph.nodes:
        if node in sub.body and node not in claimed and nodes.is_norm(node, root):
            sub.norms.append(node)
    users = tensor_users(sub.add)
    while len(users) == 1 and nodes.passes_through(users[0], root) is not None:
        users = tensor_users(users[0])
    if len(users) == 1 and nodes.is_norm(users[0], root):
        sub.output_norm = users[0]
        sub.norms.append(users[0])


def tensor_users(node: fx.Node) -> list[fx.Node]:
    return [u for u in value_users(node) if nodes.is_tensor(u)]
