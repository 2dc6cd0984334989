"""Several residual streams side by side, (batch, tokens, n, d), as hyper-connections carry them.

A sub-layer reads a sum of the streams with weights, and what it computes is added to each of them times a factor; between
sub-layers the streams are mixed by small matrices. Weights, factors and matrices are those of a token, alike for all features.
"""

from __future__ import annotations

import torch
from torch import fx

from peftc.tracing import graphs


def mixture(node: fx.Node) -> list[fx.Node]:
    """What may be the streams that `node` mixes: by a matrix, or to one by a sum with weights."""
    if graphs.is_product(node) and len(node.args) == 2:
        matrix, streams = node.args
        small = graphs.shape(matrix)[-2:] == (graphs.shape(streams)[-2:-1] * 2)
        return [streams] if isinstance(streams, fx.Node) and small and several(streams) else []
    summed = graphs.first_input(node) if node.target in ("sum", torch.sum) else None
    if summed is None or graphs.shape(summed)[:2] + graphs.shape(summed)[3:] != graphs.shape(node):
        return []
    return [s for s, factor in pairs(summed) if several(s) and graphs.shape(factor) == (*graphs.shape(s)[:-1], 1)]


def single(node: fx.Node) -> fx.Node:
    """What is added to each of several streams, before it is multiplied by the factor of each."""
    streams = graphs.shape(node)
    for value, factor in pairs(node):
        one = graphs.first_input(value) if value.op == "call_method" and value.target == "unsqueeze" else None
        spread = graphs.shape(value) == (*streams[:2], 1, *streams[3:]) and graphs.shape(factor) == (*streams[:-1], 1)
        if one is not None and spread and several(node) and graphs.shape(one) == streams[:2] + streams[3:]:
            return one
    return node


def several(node: fx.Node) -> bool:
    return len(graphs.shape(node)) == 4


def pairs(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors that are multiplied element by element, either first."""
    if not graphs.is_scaling(product) or len(product.args) != 2:
        return []
    one, other = product.args
    return [(one, other), (other, one)] if isinstance(one, fx.Node) and isinstance(other, fx.Node) else []
