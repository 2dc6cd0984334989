"""The norms of a sub-layer: before its Linears, and right behind its sum."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.dataflow.activations import is_activation
from peftc.dataflow.layer_graph import PASSING, LayerGraph
from peftc.dataflow.matrices import MatrixPart
from peftc.dataflow.nodes import example, first_input, is_tensor, nodes_in, output_of
from peftc.dataflow.operations import Op
from peftc.dataflow.values import reaches, upstream, value_users
from peftc.fakes.tensors import fake_copy
from peftc.recognition.attention.patterns import Attention
from peftc.recognition.residual_stream import Stream, gives_states
from peftc.tracing.module_calls import forward_signature
from peftc.tracing.tracer import approximate_trace


@dataclass(frozen=True)
class NormFinder:
    """Finds norms in a layer.

    Attributes:
        main: the stream of the layer.
        sides: its other streams, with sub-layers and norms of their own.
        sums: the values of all streams between sub-layers.
    """

    main: Stream
    sides: Sequence[Stream]
    sums: Collection[fx.Node]

    def before(self, body: Collection[fx.Node], res: fx.Node) -> list[fx.Node]:
        """The norms that a sub-layer computes with; one may be scaled before a Linear reads it.
        `res`: what its sum adds the result to.
        """
        layer = self.main.layer
        stream = next((side for side in self.sides if side.holds(res)), self.main)
        foreign = [side for side in self.sides if side is not stream]

        def ends(node: fx.Node) -> bool:
            return node in self.sums or layer.is_norm(node) or not is_stream(node)

        def is_stream(node: fx.Node) -> bool:
            return stream.holds(node) or stream.moves(node)

        scaled = {m for n in body if stream.holds(n) for m in upstream(n, ends) if is_stream(m)}
        norms = list(filter(layer.is_norm, sorted(scaled.union(body))))
        for norm in norms:  # which grows
            norms += [n for n in [self._read_by(norm, body)] if n is not None and n not in norms]
        return [n for n in sorted(norms) if _reads_states(n) and not any(side.holds(n) for side in foreign)]

    def _read_by(self, norm: fx.Node, body: Collection[fx.Node]) -> fx.Node | None:
        """The norm that norms of a sub-layer read, and nothing else does."""
        # Seen in: no transformers model, but layers that normalise queries, keys and values apart
        layer, source = self.main.layer, first_input(norm)
        before = None if source is None else layer.stripped(source)
        if before is None or before in self.sums or not layer.is_norm(before):
            return None
        users = [user for user in value_users(before) if is_tensor(user) or user.op == "output"]
        return before if all(user in body for user in users) else None

    def behind(self, add: fx.Node) -> fx.Node | None:
        """The norm that alone reads a sum, which the layer does not return, too."""
        layer, node, users = self.main.layer, add, [add]
        passing = (*PASSING, Op.PERMUTE)
        while len(users) == 1 and (users[0] is add or layer.op(users[0]) in passing):
            node = users[0]
            users = [u for u in value_users(node) if is_tensor(u) or u.op == "output"]
        if len(users) == 1 and layer.is_norm(users[0]):
            is_moved, behind = layer.op(node) is Op.PERMUTE and node is not add, value_users(users[0])
            # PatchTST's is between two transposes; that of SASRec's next sub-layer is behind one
            ends_here = all(layer.op(user) in (Op.PERMUTE, Op.OUTPUT) for user in behind)
            return users[0] if ends_here or not is_moved else None
        ends = (n for n in layer.graph.nodes if n.op != "call_module" and layer.is_norm(n))
        return next((end for end in ends if self._reads_alone(end, node)), None)

    def _reads_alone(self, end: fx.Node, value: fx.Node) -> bool:
        """Whether all that reads a value computes one norm of it."""
        layer, norm = self.main.layer, self.main.layer.normalization(end)
        if norm is None or layer.stripped(norm.x) is not layer.stripped(value):
            return False
        return all(user in norm.nodes for user in value_users(value) if is_tensor(user) or user.op == "output")


def _reads_states(norm: fx.Node) -> bool:
    """Whether what a norm reads depends on an argument of the layer: no table of positions."""
    # Seen in: no transformers model, but rotary embeddings whose frequencies are learned
    source = first_input(norm)
    return source is None or (gives_states(source) and is_activation(source))


def norm_parts(module: nn.Module, call: fx.Node) -> dict[str, MatrixPart]:
    """The parameters of a norm by which it scales, `w`, and which it adds, `b`: its code tells."""
    # Seen in: no transformers model, but the norms of most of the code that is written by hand
    x = example(first_input(call))
    if not isinstance(x, FakeTensor):
        return {}
    _, name, *_ = forward_signature(module).parameters
    try:
        with x.fake_mode:
            graph = approximate_trace(module, {name: fake_copy(x, x.fake_mode)}).graph
    except Exception:  # of a model's own code
        return {}
    code, result = LayerGraph(graph, module), output_of(graph).args[0]
    node = code.stripped(result) if isinstance(result, fx.Node) else None
    while node is not None and code.op(node) is Op.PERMUTE:  # Seen in: no transformers model, but VITS
        source = first_input(node)
        node = None if source is None else code.stripped(source)
    norm = None if node is None else code.normalization(node)
    parts = {} if norm is None else {"w": norm.weight, "b": norm.bias}
    return {name: part for name, part in parts.items() if part is not None}


def is_of_scores(norm: fx.Node, attentions: Sequence[Attention]) -> bool:
    """Whether a norm is of an attention's probabilities: its features are heads."""
    # Seen in: no transformers model, but DeepViT
    written = [a for a in attentions if a.sort == "written"]
    return any(reaches(a.call, norm) and reaches(norm, a.out) for a in written)


def is_only_in(norm: fx.Node, body: Collection[fx.Node], res: fx.Node, h: fx.Node, layer: LayerGraph) -> bool:
    """Whether all that depends on a norm is the result of a sub-layer with another residual."""
    # Seen in: no transformers model, but EdgeNeXt, where a network alone reads the norm of a sum
    if norm not in body or reaches(norm, res):
        return False
    results = nodes_in(output_of(layer.graph).args)
    return not any(norm in upstream(result, lambda n: n is h) for result in results)


def normalized_role(node: fx.Node, attention: Attention, layer: LayerGraph) -> str:
    """`q` or `k` for a norm of queries or keys inside an attention, else empty."""

    def projects(node: fx.Node) -> bool:  # Seen in: ScalableViT, whose keys are strided convolutions
        return layer.is_linear(node) or layer.op(node) is Op.CONVOLUTION

    for role, value in (("q", attention.q), ("k", attention.k)):
        if node in upstream(value, projects) and any(map(projects, upstream(node, projects))):
            return role
    return ""
