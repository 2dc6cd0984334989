"""The Linears of one feed-forward network: `up`, `gate` and `down` around an activation."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.dataflow.feature_axis import features_dim
from peftc.dataflow.features import is_affine, is_only_layout, source_linears
from peftc.dataflow.layer_graph import CONVOLUTIONS, LayerGraph
from peftc.dataflow.nodes import first_input, shape
from peftc.dataflow.operations import LAYOUT, Op, dim_of, name_of
from peftc.dataflow.values import reaches, upstream
from peftc.recognition.module_features import reads_patches
from peftc.recognition.residual_stream import Stream
from peftc.recognition.token_mixing import is_weighted, mixes_tokens

Source = tuple[fx.Node, Slice | None]


@dataclass(frozen=True)
class Projection:
    """A Linear in a role: the node that calls it, and the rows of its output that play the role."""

    node: fx.Node
    rows: Slice | None = None

    def slice(self, width: int) -> Slice:
        """The rows, all of the `width` features of the Linear if they are not fewer."""
        return self.rows or Slice(0, width)


def linear_modules(roles: Iterable[Mapping[str, Projection]]) -> set[object]:
    """The modules of Linears with a role, or their nodes."""
    nodes = (p.node for projections in roles for p in projections.values())
    return {node.target if node.op == "call_module" else node for node in nodes}


def input_projections(hidden: fx.Node, layer: LayerGraph) -> dict[str, Projection]:
    """The Linears that compute a hidden activation: `up`, or `gate` and `up`; none if ambiguous."""
    product = _before_norms(hidden, layer)
    if halves := _halves(product, layer):
        return halves
    operands = _factors(product, layer)
    while len(fed := {n: sources for n, sources in operands.items() if sources}) == 1 and len(operands) == 2:
        operands = _factors(layer.stripped(next(iter(fed))), layer)  # without a factor that no Linear computes
    sources = [linears[0] for linears in fed.values() if len(linears) == 1]
    if len(sources) == 2 and sources[0] != sources[1]:
        return _gated(dict(zip(fed, sources, strict=True)), layer)
    ups = source_linears(layer, hidden)
    return {"up": Projection(*ups[0])} if len(ups) == 1 else {}


def convolutions(h: fx.Node, body: Collection[fx.Node], stream: Stream) -> dict[str, Projection]:
    """`up` and `down` of a network of two matrices, of which convolutions by a kernel may be one or
    both; none where anything else has weights, mixes tokens, or goes around them.
    """
    # Seen in: no transformers model, but FastSpeech and Axial Attention
    layer = stream.layer
    own = [n for n in sorted(body) if not stream.holds(n)]
    weighted = [n for n in own if is_weighted(n, layer) and not layer.is_norm(n)]
    kernels = [n for n in weighted if reads_patches(layer.module(n))]
    if len(weighted) != 2 or not kernels or not all(n in kernels or layer.is_linear(n) for n in weighted):
        return {}
    up, down = weighted
    x, hidden = unpadded_input(up, layer), layer.input_of(down)
    if x is None or hidden is None or not reaches(up, hidden) or is_affine(hidden, up, layer):
        return {}
    behind = [n for end in weighted for n in upstream(h if end is down else hidden, lambda n, end=end: n is end)]
    alone = not any(map(stream.holds, behind)) and all(n in kernels for n in own if mixes_tokens(n, layer))
    is_network = alone and (stream.holds(x) or stream.moves(x)) and is_affine(h, down, layer)
    return {"up": Projection(up), "down": Projection(down)} if is_network else {}


def unpadded_input(call: fx.Node, layer: LayerGraph) -> fx.Node | None:
    """What a Linear or a convolution reads; of a convolution without the places that a function
    puts around it.
    """
    # Seen in: no transformers model, but VITS
    value = layer.input_of(call)
    while value is not None and name_of(value) == "pad" and isinstance(layer.module(call), CONVOLUTIONS):
        source = first_input(value)
        if shape(source)[:2] != shape(value)[:2]:  # it adds features
            break
        value = source
    return value


def _before_norms(hidden: fx.Node, layer: LayerGraph) -> fx.Node:
    """What the norms of a hidden activation read."""
    # Seen in: no transformers model, but the gated networks of x-clip
    node = layer.stripped(hidden)
    while layer.op(node) is Op.NORM and (source := first_input(node)) is not None:
        node = layer.stripped(source)
    return node


def _factors(product: fx.Node, layer: LayerGraph) -> dict[fx.Node, list[Source]]:
    """The two factors of an elementwise product, each with its Linears."""
    factors = product.all_input_nodes if layer.op(product) is Op.MUL else []
    return {n: source_linears(layer, n) for n in factors} if len(factors) == 2 else {}


def _halves(node: fx.Node, layer: LayerGraph) -> dict[str, Projection]:
    """The rows of a Linear that `glu` multiplies: up * sigmoid(gate)."""
    module, source = layer.module(node), first_input(node)
    dim = module.dim if isinstance(module, nn.GLU) else dim_of(node, -1) if name_of(node) == "glu" else None
    if source is None or dim is None or dim % len(shape(source)) != features_dim(source, layer):
        return {}
    linears = source_linears(layer, source)
    if len(linears) != 1 or not is_only_layout(source, linears[0][0], layer):
        return {}
    rows = Projection(*linears[0]).slice(layer.width(linears[0][0]))
    middle = (rows.start + rows.stop) // 2
    halves = {"up": Slice(rows.start, middle), "gate": Slice(middle, rows.stop)}
    return {role: Projection(linears[0][0], half) for role, half in halves.items()} if rows.count == 1 else {}


def _gated(operands: dict[fx.Node, Source], layer: LayerGraph) -> dict[str, Projection]:
    """z = act(gate(x)) * up(x): only `gate` has an activation."""
    for is_direct in (is_only_layout, is_affine):
        direct = [is_direct(operand, linear, layer) for operand, (linear, _) in operands.items()]
        if any(direct):
            break
    if not any(direct):
        one, other = operands
        direct = _is_layout_of_common_part(one, other, layer)
    if direct[0] == direct[1]:
        return {}
    return {"up" if d else "gate": Projection(*source) for d, source in zip(direct, operands.values(), strict=True)}


def _is_layout_of_common_part(one: fx.Node, other: fx.Node, layer: LayerGraph) -> list[bool]:
    """For each of two values, whether it is nothing but entries of what both are computed from."""
    # Seen in: no transformers model, but Sana (an activation and a convolution before the halves)
    behind = [set(upstream(n, layer.is_linear)) for n in (one, other)]
    own = [nodes - behind[1 - i] for i, nodes in enumerate(behind)]
    return [all(layer.op(n) in (*LAYOUT, Op.ITEM, Op.CAST) for n in nodes) for nodes in own]
