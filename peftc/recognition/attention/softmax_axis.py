"""Which of the two operands of attention scores the softmax compares: the keys.

A softmax gives probabilities over keys, for each query. Its dimension is followed back to the product of queries and keys, through
operations that keep the order of dimensions, permute them, or split and merge them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx, nn

from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import value_operands

_PERMUTE = frozenset(
    {"transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "transpose_", "swapaxes_"}
)
_MATRIX = frozenset({"T", "mT", "H", "mH", "adjoint"})
_RESHAPE = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"})


def compared_dim(softmax: fx.Node, scores: fx.Node, root: nn.Module) -> int | None:
    """The dimension of the scores over which a softmax sums to one; None where it cannot be followed.

    Args: `scores`: the product of queries and keys behind the softmax.
    """
    first = nodes.first_input(softmax)
    size = len(nodes.shape(first))
    dim = softmax_dim(softmax, root)
    if first is None or not isinstance(dim, int) or not -size <= dim < size:
        return None
    node, at = first, dim % size
    while node is not scores:
        before = [n for n in value_operands(node) if scores in nodes.upstream(n, lambda m: m is scores)]
        if len(before) != 1:
            return None
        if (earlier := dim_before(node, before[0], at)) is None:
            return None
        node, at = before[0], earlier
    return at


def softmax_dim(softmax: fx.Node, root: nn.Module) -> Any:
    """The `dim` of a softmax; the last where it is not said."""
    if softmax.op == "call_module":
        dim = getattr(nodes.module_of(softmax, root), "dim", -1)
        return -1 if dim is None else dim
    return softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else -1)


def dim_before(node: fx.Node, before: fx.Node, at: int) -> int | None:
    """Which dimension of an operand becomes the dimension `at` of the result."""
    name = str(getattr(node.target, "__name__", node.target)).rpartition(".")[2]
    old, new = nodes.shape(before), nodes.shape(node)
    if name == "getattr":
        name = str(node.args[1])
    if name in _PERMUTE or name in _MATRIX:
        return permuted(node, name, len(old), at)
    if name in _RESHAPE:
        same = [i for i in range(len(old)) if (old[i], prod(old[i + 1 :])) == (new[at], prod(new[at + 1 :]))]
        return same[0] if len(same) == 1 else None
    return at if len(old) == len(new) else None


def permuted(node: fx.Node, name: str, size: int, at: int) -> int | None:
    """The dimension that a permutation brings to `at`, as the operation itself does it to one of `size` lengths."""
    lengths = torch.empty(tuple(range(2, size + 2)), device="meta")
    rest = [a for a in node.args if not isinstance(a, fx.Node)]
    if name in _MATRIX:
        moved = getattr(lengths, name)
        moved = moved() if name == "adjoint" else moved
    elif len(node.all_input_nodes) > 1:  # dimensions that are computed
        return None
    else:
        keywords = {k: v for k, v in node.kwargs.items() if k != "input"}
        moved = getattr(lengths, name)(*rest, **keywords)
    return list(lengths.shape).index(moved.shape[at])
