"""Attention in a traced layer, however it is written: through transformers' interface, torch's function, or written out.

A written-out attention is a product of two activations (scores), a softmax over them, and a product of that with a third
activation. What is done to the scores in between (scale, mask, position bias) does not matter for its roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from peftc.recognition.attention.softmax_axis import compared_dim
from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import value_operands, value_users
from peftc.tracing.patches import attention, autograd_function

SOFTMAX = (nn.functional.softmax, torch.softmax)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention: the values it compares and mixes, and its result.

    `call` is the call of the interface or of torch's function; of a written-out attention its softmax, with `scores` the
    product of queries and keys.
    """

    sort: Literal["interface", "function", "written"]
    call: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    out: fx.Node
    scores: fx.Node | None = None


def attentions(graph: fx.Graph, root: nn.Module) -> list[Attention]:
    """Every attention of a layer, in the order in which they run."""
    return [found for node in graph.nodes if (found := attention_at(node, root)) is not None]


def attention_at(node: fx.Node, root: nn.Module) -> Attention | None:
    if node.op == "call_function" and node.target is attention:
        q, k, v = node.args[2:5]
        out = next((u for u in node.users if u.args[1:] == (0,)), node)
        return made("interface", node, q, k, v, out)
    if node.op == "call_function" and node.target is nn.functional.scaled_dot_product_attention:
        given = [*node.args, *(node.kwargs.get(n) for n in ("query", "key", "value") if n in node.kwargs)]
        return made("function", node, given[0], given[1], given[2], node) if asks(given[0]) else None
    return written(node, root) if is_softmax(node, root) else None


def asks(query: Any) -> bool:
    """Whether queries are computed from activations: those of a mixture of states are parameters, alike for every token."""
    return isinstance(query, fx.Node) and is_activation(query)


def made(sort: Any, call: fx.Node, q: Any, k: Any, v: Any, out: fx.Node) -> Attention | None:
    nodes = all(isinstance(value, fx.Node) for value in (q, k, v))
    return Attention(sort, call, q, k, v, out) if nodes else None


def is_softmax(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(nodes.module_of(node, root), nn.Softmax)
    if node.target is autograd_function:  # which can only be told by its name
        return "softmax" in getattr(node.kwargs["function"], "__name__", "").lower()
    return node.target in SOFTMAX if node.op == "call_function" else node.target == "softmax"


def written(softmax: fx.Node, root: nn.Module) -> Attention | None:
    """The attention whose softmax this is; None for another use of a softmax (a router, a gate)."""
    mixings, first = list(mixed(softmax)), nodes.first_input(softmax)
    candidates = list(scores_behind(first, root)) if first is not None else []
    if not mixings or not candidates:
        return None
    alike = [(mixing, scores) for mixing in mixings for scores in candidates if of_itself(scores, mixing[1], root)]
    if alike and len(mixings) > 1:  # keys of its own beside others, of global tokens
        (out, v), scores = alike[0]
        q, k = compared(scores, softmax, root)
        return Attention("written", softmax, q, k, v, out, scores)
    out, v = mixings[0]
    read = read_by(v, root)
    related = [n for n in candidates if read_by(compared(n, softmax, root)[1], root) & read]
    related += [n for n in candidates if nodes.shape(n) == nodes.shape(first)]  # no scores of relative positions
    scores = (related or candidates)[0]
    q, k = compared(scores, softmax, root)
    return Attention("written", softmax, q, k, v, out, scores)


def of_itself(scores: fx.Node, v: fx.Node, root: nn.Module) -> bool:
    """Whether queries, keys and values are made of one value."""
    read = [read_by(value, root) for value in (*operands(scores), v)]
    return bool(read[0]) and read[0] == read[1] == read[2]


def mixed(softmax: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Products downstream of a softmax, each with the operand that does not come from it."""
    seen, todo = {softmax}, [softmax]
    while todo:
        node = todo.pop(0)
        for user in value_users(node):
            if user in seen:
                continue
            seen.add(user)
            if nodes.is_product(user) and not nodes.is_edit(user):
                others = [o for o in operands(user) if o not in seen]
                if len(others) == 1 and is_activation(others[0]):
                    yield user, others[0]
            elif user.op != "call_module" or nodes.is_tensor(user):
                todo.append(user)


def scores_behind(node: fx.Node, root: nn.Module) -> Iterator[fx.Node]:
    """The nearest products of two activations upstream; a Linear before them mixes heads."""
    stop = lambda n: is_scores(n) or (nodes.is_linear(n, root) and not mixes_heads(n))  # noqa: E731
    return (n for n in nodes.upstream(node, stop) if is_scores(n))


def mixes_heads(linear: fx.Node) -> bool:
    """Whether a Linear reads scores, but for their layout and scale."""
    node = nodes.first_input(linear)
    while node is not None and not is_scores(node):
        before = value_operands(node) if node.op in ("call_method", "call_function") else []
        node = before[0] if len(before) == 1 else None
    return node is not None


def is_scores(node: fx.Node) -> bool:
    return nodes.is_product(node) and len(found := operands(node)) == 2 and all(map(is_activation, found))


def is_activation(node: fx.Node) -> bool:
    """Not a parameter, nor made of parameters alone."""
    return any(n.op == "placeholder" for n in nodes.upstream(node, lambda n: n.op == "placeholder"))


def read_by(value: fx.Node, root: nn.Module) -> set[fx.Node]:
    """What the Linears that feed a value read."""
    linears = (n for n in nodes.upstream(value, lambda n: nodes.is_linear(n, root)) if nodes.is_linear(n, root))
    return {nodes.stripped(first, root) for n in linears if (first := nodes.first_input(n)) is not None}


def operands(product: fx.Node) -> tuple[fx.Node, ...]:
    """The two factors of a product of matrices, the one whose last dimension is summed over first."""
    given: list[Any] = [*product.args, *product.kwargs.values()]
    if product.target is torch.einsum:
        given = list(given[1]) if isinstance(given[1], (tuple, list)) else given[1:]
        if len(given) == 2 and last_label_first(str(product.args[0])):
            given = given[::-1]
    elif str(getattr(product.target, "__name__", product.target)) == "baddbmm":
        given = [product.kwargs.get("batch1", given[1]), product.kwargs.get("batch2", given[2])]
    return tuple(g for g in given[:2] if isinstance(g, fx.Node))


def compared(scores: fx.Node, softmax: fx.Node, root: nn.Module) -> tuple[fx.Node, ...]:
    """The queries and the keys of a product: the probabilities of a query are those of all keys. Where the softmax cannot be followed
    back, it is taken to be over the last dimension.
    """
    first, second = operands(scores)
    dim = compared_dim(softmax, scores, root)
    own = rows_of_result(scores)
    return (second, first) if dim is not None and dim == own else (first, second)


def rows_of_result(product: fx.Node) -> int | None:
    """The dimension of the result of a product that is of its first operand, as `operands` gives them, alone."""
    size = len(nodes.shape(product))
    if product.target is not torch.einsum:
        return size - 2
    inputs, _, result = str(product.args[0]).replace(" ", "").partition("->")
    texts = inputs.split(",")
    first, second = texts[::-1] if last_label_first(str(product.args[0])) else texts
    own = [c for c in result if c in first and c not in second and c != "."]
    return size - len(result[result.index(own[0]) :].replace("...", "")) if len(own) == 1 else None


def last_label_first(equation: str) -> bool:
    """Whether the last label of an einsum's result is one of its first operand alone."""
    inputs, _, result = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    return bool(result) and result[-1] in first and result[-1] not in second
