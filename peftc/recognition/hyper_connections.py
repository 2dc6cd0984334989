"""Several residual streams side by side, (batch, tokens, n, d), as hyper-connections carry them.

A sub-layer reads a weighted sum of the streams, and its result is added to each of them times a
factor; between sub-layers the streams are mixed by small matrices. Weights, factors and matrices
are those of a token, the same for all features.

Source: Zhu et al. 2024, "Hyper-Connections", arXiv:2409.19606.
"""

from __future__ import annotations

from torch import fx

from peftc.dataflow.nodes import first_input, shape
from peftc.dataflow.operations import SCALE, Op, name_of, op_of


def mixed_streams(node: fx.Node) -> list[fx.Node]:
    """What may be the streams that `node` mixes: by a matrix, or to one by a weighted sum."""
    if op_of(node) is Op.MATMUL and len(node.args) == 2:
        matrix, streams = node.args
        is_small = shape(matrix)[-2:] == (shape(streams)[-2:-1] * 2)
        return [streams] if isinstance(streams, fx.Node) and is_small and is_several(streams) else []
    products = first_input(node) if op_of(node) is Op.SUM else None
    if products is None or shape(products)[:2] + shape(products)[3:] != shape(node):
        return []
    return [s for s, factor in _factors(products) if is_several(s) and shape(factor) == (*shape(s)[:-1], 1)]


def sublayer_output(node: fx.Node) -> fx.Node:
    """What is added to each of several streams, before it is multiplied by the factor of each."""
    sizes = shape(node)
    for value, factor in _factors(node):
        single = first_input(value) if name_of(value) == "unsqueeze" else None
        is_spread = shape(value) == (*sizes[:2], 1, *sizes[3:]) and shape(factor) == (*sizes[:-1], 1)
        if single is not None and is_spread and is_several(node) and shape(single) == sizes[:2] + sizes[3:]:
            return single
    return node


def is_several(node: fx.Node) -> bool:
    return len(shape(node)) == 4


def _factors(product: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The two tensors that are multiplied element by element, in both orders."""
    if op_of(product) not in SCALE or len(product.args) != 2:
        return []
    one, other = product.args
    return [(one, other), (other, one)] if isinstance(one, fx.Node) and isinstance(other, fx.Node) else []
