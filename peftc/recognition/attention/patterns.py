"""Attention in a traced layer: by transformers' interface, by PyTorch's function, or written out.

A written-out attention is a product of two activations (scores), a softmax over them, and a product
of that with a third activation. What is done to the scores in between (scale, mask, position bias)
does not matter for the roles.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from peftc.dataflow.activations import is_activation
from peftc.dataflow.einsum import einsum_labels, einsum_operands, equation_of, is_einsum
from peftc.dataflow.feature_axis import dim_before, softmax_dim
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import first_input, is_edit, is_tensor, shape
from peftc.dataflow.operations import BY_ENTRY, LAYOUT, Op, name_of, op_of
from peftc.dataflow.values import reaches, upstream, value_operands, value_users
from peftc.tracing.operations import attention


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention. `call`: of the interface or of PyTorch's function; of a written-out attention
    its softmax, with `scores` the product of queries and keys; of a linear one, without a softmax,
    its second product, with `scores` the first. `other_pairs`: queries and keys of further products
    in the same scores.
    """

    sort: Literal["interface", "function", "written", "linear"]
    call: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    scores: fx.Node | None = None
    other_pairs: tuple[tuple[fx.Node, ...], ...] = ()


def attentions(layer: LayerGraph) -> list[Attention]:
    """Every attention of a layer, in the order in which they run."""
    return [a for node in layer.graph.nodes if (a := attention_at(node, layer)) is not None]


def attention_at(node: fx.Node, layer: LayerGraph) -> Attention | None:
    op = layer.op(node)
    if op is not Op.ATTENTION:
        return _written(node, layer) if op is Op.SOFTMAX else None
    is_interface = node.target is attention
    inputs: list[Any] = [*node.args, *(node.kwargs[n] for n in ("query", "key", "value") if n in node.kwargs)]
    q, k, v = inputs[2:5] if is_interface else inputs[:3]
    if not all(isinstance(n, fx.Node) for n in (q, k, v)) or not (is_interface or is_activation(q)):
        return None  # queries that are parameters, alike for every token, mix states: hyper-connections
    out = next((u for u in node.users if u.args[1:] == (0,)), node) if is_interface else node
    return Attention("interface" if is_interface else "function", node, q, k, v, out)


def _written(softmax: fx.Node, layer: LayerGraph) -> Attention | None:
    """The attention whose softmax this is; None for another use of a softmax (a router, a gate)."""
    mixtures, logits = list(value_mixtures(softmax)), first_input(softmax)
    if not mixtures or logits is None:
        return None
    # the nearest products of two activations; a Linear before them mixes heads
    nodes = upstream(logits, lambda n: is_scores(n) or _computes_factor(n, layer))
    if not (candidates := [n for n in nodes if is_scores(n)]):
        return None
    own = [(pair, scores) for pair in mixtures for scores in candidates if _is_self_attention(scores, pair[1], layer)]
    if own and len(mixtures) > 1:  # global tokens with keys of their own
        (out, v), scores = own[0]
    else:
        out, v = mixtures[0]
        inputs = linear_inputs(v, layer)
        related = [n for n in candidates if linear_inputs(compared(n, softmax, layer)[1], layer) & inputs]
        related += [n for n in candidates if shape(n) == shape(logits)]  # not of relative positions
        scores = (related or candidates)[0]
    if _is_over_others(softmax, out, v, scores, layer):
        return None
    q, k = compared(scores, softmax, layer)
    others = tuple(compared(n, softmax, layer) for n in candidates if n is not scores)
    return Attention("written", softmax, q, k, v, out, scores, others)


def _is_self_attention(scores: fx.Node, v: fx.Node, layer: LayerGraph) -> bool:
    # Seen in: Pegasus-X, whose self-attention would be that of its global tokens without it
    inputs = [linear_inputs(value, layer) for value in (*factors(scores), v)]
    return bool(inputs[0]) and inputs[0] == inputs[1] == inputs[2]


def value_mixtures(softmax: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Products downstream of a softmax, each with the operand that does not come from it."""
    seen, queue = {softmax}, [softmax]
    while queue:
        for user in (u for u in value_users(queue.pop(0)) if u not in seen):
            seen.add(user)
            if op_of(user) is Op.MATMUL and not is_edit(user):
                others = [o for o in factors(user) if o not in seen]
                if len(others) == 1 and is_activation(others[0]):
                    yield user, others[0]
                elif others:  # a matrix that mixes heads
                    queue.append(user)
            elif user.op != "call_module" or is_tensor(user):
                queue.append(user)


def has_softmax_mixture(body: Collection[fx.Node], layer: LayerGraph) -> bool:
    """Whether a softmax is multiplied with an activation, as in an attention."""
    # Seen in: attentions of an unknown kind. Without it, they would be mixers
    return any(layer.op(n) is Op.SOFTMAX and (any(value_mixtures(n)) or _weighs_pairs(n)) for n in body)


def _weighs_pairs(softmax: fx.Node) -> bool:
    """Whether a softmax multiplies, entry by entry, values that lack one of its dimensions."""
    # Seen in: no transformers model, but attention written as `(weights[..., None] * v).sum(-2)`
    nodes = [softmax]
    for node in nodes:  # which grows
        for user in value_users(node):
            others = [n for n in value_operands(user) if n is not node and is_activation(n)]
            if op_of(user) is Op.MUL and others and shape(user) not in (shape(node), shape(others[0])):
                return True
            nodes += [user] if op_of(user) in LAYOUT and user not in nodes else []
    return False


def _computes_factor(node: fx.Node, layer: LayerGraph) -> bool:
    """Whether a node is a Linear before the scores, not one that mixes heads of them."""
    return layer.is_linear(node) and not reads_scores(layer.input_of(node), layer)


def reads_scores(value: fx.Node | None, layer: LayerGraph) -> bool:
    """Whether a value is scores, but for layout and what is done entry by entry."""
    # Seen in: CaiT (talking heads), which has no role without it
    nodes = [value]
    for node in nodes:  # which grows
        if node is not None and is_scores(node):
            return True
        if node is not None and layer.op(node) in (*BY_ENTRY, *LAYOUT, Op.ITEM):
            nodes += [n for n in value_operands(node) if n not in nodes]
    return False


def is_scores(node: fx.Node) -> bool:
    """Whether a node multiplies two activations as matrices."""
    return op_of(node) is Op.MATMUL and len(inputs := factors(node)) == 2 and all(map(is_activation, inputs))


def linear_inputs(value: fx.Node, layer: LayerGraph) -> set[fx.Node]:
    """What the nearest Linears upstream of a value read."""
    linears = layer.linears(set(upstream(value, layer.is_linear)))
    return {layer.stripped(source) for n in linears if (source := layer.input_of(n)) is not None}


def factors(product: fx.Node) -> tuple[fx.Node, ...]:
    """The two factors of a product of matrices; the last dimension of the first is summed over."""
    inputs: list[Any] = [*product.args, *product.kwargs.values()]
    if is_einsum(product):
        inputs = einsum_operands(product)
        if len(inputs) == 2 and _is_transposed(equation_of(product)):
            inputs = inputs[::-1]
    elif name_of(product) in ("baddbmm", "addmm"):
        inputs = inputs[1:]
    return tuple(n for n in inputs[:2] if isinstance(n, fx.Node))


def compared(scores: fx.Node, softmax: fx.Node, layer: LayerGraph) -> tuple[fx.Node, ...]:
    """Queries and keys of a product: the softmax sums over keys, by default the last dimension."""
    first, second = factors(scores)
    dim = softmax_dim(softmax, scores, layer)
    return (second, first) if dim is not None and dim == _rows_dim(scores) else (first, second)


def _is_over_others(softmax: fx.Node, out: fx.Node, v: fx.Node, scores: fx.Node, layer: LayerGraph) -> bool:
    """Whether a softmax sums over other entries than the product with the values does."""
    # Seen in: no transformers model, but Slot Attention, whose softmax is over the queries
    operands, labels, result = product_labels(out)
    inner = next((i for i, n in enumerate(operands) if n is not v), None)
    summed = [c for c in labels[inner] if c not in result] if inner is not None else []
    axis, node = softmax_dim(softmax, scores, layer), operands[inner or 0]
    if inner is None or axis is None or len(summed) != 1:
        return False
    dim: int | None = labels[inner].index(summed[0])
    while node is not scores and dim is not None:
        sources = [n for n in value_operands(node) if reaches(scores, n) and len(shape(n)) == len(shape(node))]
        sources = sources if len(sources) < 2 else [n for n in sources if shape(n) == shape(node)]
        if len(sources) != 1 or layer.op(node) not in (*BY_ENTRY, Op.PERMUTE, Op.SOFTMAX):
            return False
        node, dim = sources[0], dim_before(node, sources[0], dim)
    return dim is not None and dim != axis


def product_labels(product: fx.Node) -> tuple[list[fx.Node], list[str], str]:
    """The operands of a product, with a label for each dimension of them and of the result."""
    if is_einsum(product):
        return einsum_operands(product), *einsum_labels(product)
    operands = list(factors(product))
    size = len(shape(product)) - 2
    batch = "0123456789"[:size]
    labels = [batch[size - (len(shape(n)) - 2) :] + ends for n, ends in zip(operands, ("ij", "jk"), strict=True)]
    return operands, labels, batch + "ik"


def _rows_dim(product: fx.Node) -> int | None:
    """The dimension of the result of a product that its first factor alone has."""
    size = len(shape(product))
    if not is_einsum(product):
        return size - 2
    equation = equation_of(product)
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, second = inputs.split(",")[:: -1 if _is_transposed(equation) else 1]
    own = [c for c in result if c in first and c not in second and c != "."]
    return size - len(result[result.index(own[0]) :].replace("...", "")) if len(own) == 1 else None


def _is_transposed(equation: str) -> bool:
    """Whether the last label of an einsum's result is one of its first operand alone."""
    # Seen in: no transformers model with effect; einsums whose operands are swapped
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    return bool(result) and result[-1] in first and result[-1] not in second
