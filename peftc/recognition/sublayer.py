"""One sub-layer: what a sum adds to the residual stream, and the roles of the Linears in it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from peftc.dataflow.features import is_affine, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.operations import Op
from peftc.dataflow.values import upstream
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.attention.projections import attention_projections, output_linear, without_sorting
from peftc.recognition.attention.side_by_side import heads_beside, joined_beside
from peftc.recognition.ffn import Projection, convolutions, input_projections, unpadded_input
from peftc.recognition.moe.lists import Experts, Network
from peftc.recognition.moe.routers import Router
from peftc.recognition.residual_stream import Stream
from peftc.recognition.token_mixing import is_weighted, mixes, mixes_neighbours
from peftc.recognition.unplaced.unknown_products import unknown_matrices


@dataclass
class SubLayer:
    """What one sum adds to the residual stream. `body`: the nodes that compute it."""

    kind: Literal["attn", "ffn", "mixer", "untraced"]
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
    heads: list[dict[str, Projection]] = field(default_factory=list[dict[str, Projection]])  # beside the first
    linears: list[fx.Node] = field(default_factory=list[fx.Node])  # those without a role
    norms: list[fx.Node] = field(default_factory=list[fx.Node])
    output_norm: fx.Node | None = None  # the post-norm, to which `norm(...)` refers first
    experts: list[Experts] = field(default_factory=list["Experts"])
    router: Router | None = None
    # feed-forward networks beside the experts; those of modules that could not be traced by names
    shared: list[dict[str, Projection]] = field(default_factory=list[dict[str, Projection]])
    shared_in_leaf: list[Network] = field(default_factory=list["Network"])
    is_added_again: bool = False  # another sum of the layer has `h` as a term, too
    calls_again: bool = False  # the Linears of an earlier sub-layer, at which these have their sites

    @property
    def attention(self) -> Attention | None:
        """Its attention, the first of several."""
        return self.attentions[0] if self.attentions else None

    def set_linears(self, layer: LayerGraph, *others: fx.Node | None) -> None:
        """Lists the Linears without a role. `others`: those whose role is not in `projections`."""
        roles = {p.node for roles in (self.projections, *self.heads) for p in roles.values()} | {*others, self.res}
        self.linears = [n for n in layer.linears(self.body) if n not in roles]


def set_attention_roles(sub: SubLayer, stream: Stream, earlier: Collection[fx.Node] = ()) -> None:
    """`earlier`: Linears of sub-layers before, whose results may be mixed with those of this."""
    # Seen in: no transformers model, but values that are added to those of the first layer
    sub.kind, sub.variant, layer = "attn", "self", stream.layer
    attention, *_ = attended = without_sorting(sub.attentions, layer)
    ends, sub.attentions = {a.call for a in sub.attentions if a not in attended}, attended
    sub.projections = attention_projections(attended, sub.body - {*earlier}, ends, stream)
    own = {n for n in sub.body if n not in earlier and stream.is_own(n)}
    roles = sub.attentions, sub.projections, layer
    sub.heads = heads_beside(*roles) or joined_beside(*roles, own)
    out = output_linear(attended, sub.body, layer)
    if out is not None and attention.out in sub.body:
        sub.projections["o"] = Projection(out)
    if not any(map(stream.holds, stream.body(attention.k))):
        sub.variant = "cross"
    query, key = sub.projections.get("q"), sub.projections.get("k")
    sub.x = sub.context = sub.x if query is None else stream.read_by(query.node, sub.x)
    if key is not None:
        contexts = {layer.input_of(roles["k"].node) for roles in (sub.projections, *sub.heads) if "k" in roles}
        sub.context = stream.read_by(key.node, sub.x)
        if sub.variant == "cross":  # a state has one value: none of several contexts is `c`
            sub.context = contexts.pop() if len(contexts) == 1 else None


def set_ffn_roles(sub: SubLayer, stream: Stream) -> None:
    layer = stream.layer
    if roles := convolutions(sub.h, sub.body, stream):
        sub.projections, sub.x = roles, unpadded_input(roles["up"].node, layer)
        sub.hidden = unpadded_input(roles["down"].node, layer)
        return
    # not the Linears that compute gates from something else, nor those before joined tokens
    downs = [(n, rows) for n, rows in source_linears(layer, sub.h) if n in sub.body and stream.reaches(n)]
    gate = _gate_of_result(sub.h, [n for n, _ in downs], stream)
    downs = [(n, rows) for n, rows in downs if n is not gate]
    if len(downs) != 1:
        return
    down = downs[0][0]
    behind = {n for n in upstream(sub.h, lambda n: n in (down, gate)) if n in sub.body and stream.reaches(n)}
    behind -= {down, gate}
    hidden = layer.input_of(down)
    others = [n for n in behind if is_weighted(n, layer) and not layer.is_norm(n)]
    if hidden is None or others or unknown_matrices(behind, layer):
        return  # these take part in `h`, not through `down`
    sub.projections, sub.hidden = {"down": Projection(*downs[0])}, hidden
    # only Linears of this sub-layer, none that computed the stream
    sub.projections |= {role: p for role, p in input_projections(hidden, layer).items() if p.node in sub.body}
    if "up" in sub.projections and "gate" not in sub.projections:
        sub.projections["up"] = _first_linear(sub.projections["up"], sub.body, stream)
    first = sub.projections.get("up") or sub.projections.get("gate")
    if first is not None:
        sub.x = layer.input_of(first.node) if gate is None else stream.read_by(first.node, sub.x)


def relabel_as_ffn(sub: SubLayer, stream: Stream) -> None:
    """Makes a mixer the feed-forward part of its layer."""
    sub.kind = "ffn"
    set_ffn_roles(sub, stream)
    sub.set_linears(stream.layer)


def relabel_local_mixer(sub: SubLayer, stream: Stream) -> None:
    """Without another ffn in its layer, a last mixer of neighbouring tokens becomes the `ffn`. The
    layers of a loop are in one graph: there, each one before an attention.
    """
    # Seen in: PVT v2, RWKV, SegFormer
    if mixes(sub.body, stream) and mixes_neighbours(sub.body, stream):
        relabel_as_ffn(sub, stream)


def _gate_of_result(h: fx.Node, linears: Collection[fx.Node], stream: Stream) -> fx.Node | None:
    """Of two Linears whose results are multiplied the one that reads the stream, through an
    activation: a gate of what the other computes of hidden features.
    """
    # Seen in: RWKV
    layer = stream.layer
    product = layer.stripped(h)
    factors = product.all_input_nodes if layer.op(product) is Op.MUL else []
    if len(linears) != 2 or len(factors) != 2:
        return None
    for factor, other in (factors, factors[::-1]):
        gates = [n for n in linears if n in upstream(factor, layer.is_linear)]
        downs = [n for n in linears if n in upstream(other, layer.is_linear)]
        if len(gates) == len(downs) == 1 and gates != downs and not is_affine(factor, gates[0], layer):
            x, hidden = layer.input_of(gates[0]), layer.input_of(downs[0])
            if x is None or hidden is None or layer.linears(stream.body(x)):
                continue  # the tokens before may be mixed with those of the stream
            if layer.linears(stream.body(hidden)):
                return gates[0]
    return None


def _first_linear(up: Projection, body: Collection[fx.Node], stream: Stream) -> Projection:
    """Of the Linears of a network with several activations the one that reads the stream."""
    # Seen in: no transformers model, but LocalViT, with a Linear behind its depthwise convolution
    layer = stream.layer
    x = layer.input_of(up.node)
    while x is not None and not (stream.holds(x) or stream.moves(x) or stream.shifts(x)):
        sources = source_linears(layer, x)
        if len(sources) != 1 or sources[0][0] not in body or stream.holds(sources[0][0]):
            break
        if is_affine(x, sources[0][0], layer):
            break
        up = Projection(*sources[0])
        x = layer.input_of(up.node)
    return up
