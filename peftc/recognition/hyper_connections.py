"""Several residual streams side by side, (batch, tokens, n, d), as hyper-connections carry them.

A sub-layer reads a sum of the streams with weights, and what it computes is added to each of them times a factor; between
sub-layers the streams are mixed by small matrices. Weights, factors and matrices are those of a token, alike for all features.
"""

from __future__ import annotations

import torch
from torch import fx

from peftc.recognition.graph import nodes


def mixture(node: fx.Node) -> list[fx.Node]:
    """What may be the streams that `node` mixes: by a matrix, or to one by a sum with weights."""
    if nodes.is_product(node) and len(node.args) == 2:
        matrix, streams = node.args
        small = nodes.shape(matrix)[-2:] == (nodes.shape(streams)[-2:-1] * 2)
        return [streams] if isinstance(streams, fx.Node) and small and several(streams) else []
    summed = nodes.first_input(node) if node.target in ("sum", torch.sum) else None
    if summed is None or nodes.shape(summed)[:2] + nodes.shape(summed)[3:] != nodes.shape(node):
        return []
    return [s for s, factor in pairs(summed) if several(s) and nodes.shape(factor) == (*nodes.shape(s)[:-1], 1)]


def single(node: fx.Node) -> fx.Node:
    """What is added to each of several streams, before it is multiplied by the factor of each."""
    streams = nodes.shape(node)
    for value, factor in pairs(node):
        one = nodes.first_input(value) if value.op == "call_method" and value.target == "unsqueeze" else None
        spread = nodes.shape(value) == (*streams[:2], 1, *streams[3:]) and nodes.shape(factor) == (*streams[:-1], 1)
        if one is not None and spread and several(node) and nodes.shape(one) == streams[:2] + streams[3:]:
            return one
    return node


def several(node: fx.Node) -> bool:
    return len(nodes.shape(node)) == 4


def pairs(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors that are multiplied element by element, either first."""
    if not nodes.is_scaling(product) or len(product.args) != 2:
        return []
    one, other = product.args
    return [(one, other), (other, one)] if isinstance(one, fx.Node) and isinstance(other, fx.Node) else []
