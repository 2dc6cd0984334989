"""Attention without a softmax over scores: q (kᵀ v), or (q kᵀ) v with weights of another kind.

Two products follow each other, with a running sum over tokens between them if it is causal. What
the second sums over is a dimension of the keys: features of
them in q (kᵀ v), tokens in (q kᵀ) v. Of the other two operands, one keeps its features in the
result, where the next Linear reads them: the values. What is done between the products does not
matter, unless it is a softmax (of scores) or a Linear.

Source: Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from peftc.dataflow.activations import is_activation
from peftc.dataflow.feature_axis import dim_before
from peftc.dataflow.features import follow_numbers, source_linears
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import shape
from peftc.dataflow.numbers import numbered, varies
from peftc.dataflow.operations import Op
from peftc.dataflow.values import reaches, upstream, value_operands
from peftc.recognition.attention.patterns import Attention, attentions, is_scores, product_labels


def all_attentions(layer: LayerGraph) -> list[Attention]:
    known = attentions(layer)
    return [*known, *linear_attentions(layer, known)]


def linear_attentions(layer: LayerGraph, known: Collection[Attention]) -> Iterator[Attention]:
    """The attentions of a layer without a softmax over scores. `known`: those with one."""
    products = [n for n in layer.graph.nodes if layer.op(n) is Op.MATMUL and not layer.is_linear(n) and is_scores(n)]
    softmaxes = {a.call for a in known if a.sort == "written"}
    products = [n for n in products if softmaxes.isdisjoint(_behind(n, layer))]
    for second in products:
        firsts = [n for n in _behind(second, layer) if n in products and n is not second]
        if len(firsts) > 1:  # not the sums of weights, by which some divide
            firsts = [n for n in firsts if len(shape(n)) >= len(shape(second)) and shape(n)[-1] > 1]
        later = [n for n in products if n is not second and second in _behind(n, layer)]
        if len(firsts) == 1 and not later and (one := _attention(firsts[0], second, layer)) is not None:
            yield one


def _behind(node: fx.Node, layer: LayerGraph) -> set[fx.Node]:
    return set(upstream(node, layer.is_linear))


def _attention(first: fx.Node, second: fx.Node, layer: LayerGraph) -> Attention | None:
    operands, labels, result = product_labels(second)
    inner = next((i for i, n in enumerate(operands) if reaches(first, n)), None)
    others = [i for i, n in enumerate(operands) if i != inner and not reaches(first, n) and is_activation(n)]
    if inner is None or not others:
        return None
    outer = max(others, key=lambda i: len(shape(operands[i])))
    summed = [c for c in labels[inner] if c in labels[outer] and c not in result]
    own = [c for c in labels[outer] if c in result and c not in labels[inner]]
    if len(summed) != 1 or len(own) > 1 or (not own and not _scans(operands[inner], first, layer)):
        return None
    dim = _dim_at(operands[inner], first, labels[inner].index(summed[0]))
    pair = None if dim is None else _keys_first(first, dim)
    is_value = _is_feature(second, result.index(own[0]), layer) if own else False  # sums up to each token
    if pair is None or is_value is None:
        return None
    k, other = pair
    q, v = (other, operands[outer]) if is_value else (operands[outer], other)
    if any(not source_linears(layer, n) for n in (q, k, v)):
        return None
    return Attention("linear", second, q, k, v, second, first)


def _scans(node: fx.Node, first: fx.Node, layer: LayerGraph) -> bool:
    """Whether a running sum of products over tokens stands between."""
    return any(layer.op(n) is Op.SCAN for n in upstream(node, lambda n: n is first))


def _dim_at(node: fx.Node, first: fx.Node, dim: int) -> int | None:
    """The dimension of an earlier product that becomes `dim` of a value."""
    while node is not first:
        sources = [n for n in value_operands(node) if reaches(first, n)]
        if len(sources) > 1:  # not a sum of weights, by which these are divided
            sources = [n for n in sources if shape(n) == shape(node)]
        earlier = dim_before(node, sources[0], dim) if len(sources) == 1 else None
        if earlier is None:
            return None
        node, dim = sources[0], earlier
    return dim


def _keys_first(first: fx.Node, dim: int) -> tuple[fx.Node, fx.Node] | None:
    """The operands of a product, the one first whose dimension is `dim` of the result."""
    operands, labels, result = product_labels(first)
    owners = [i for i, text in enumerate(labels[:2]) if result[dim] in text]
    if len(operands) != 2 or len(owners) != 1:
        return None
    return operands[owners[0]], operands[1 - owners[0]]


def _is_feature(product: fx.Node, dim: int, layer: LayerGraph) -> bool | None:
    """Whether a dimension of a result is one of features for the next Linear; None if unknown."""
    linear = layer.consumer_linear(product, set(layer.graph.nodes))
    source = layer.input_of(linear) if linear is not None else None
    if linear is None or source is None:
        return None
    own = layer.product(linear)
    last = layer.feature_dims(linear).features[0] if layer.is_linear_module(linear) else len(shape(source)) - 1
    features = own.d_in.features if own is not None else (last,)
    with unset_fake_temporarily():
        sizes = shape(product)
        numbers: dict[fx.Node, Any] = {product: numbered(sizes, [dim])}
        for node in sorted(n for n in upstream(source, lambda n: n is product) if n is not product):
            sources = [n for n in value_operands(node) if n in numbers]
            if sources and (moved := follow_numbers(node, sources[0], numbers)) is not None:
                numbers[node] = moved
        moved = numbers.get(source)
        if not isinstance(moved, torch.Tensor) or sizes[dim] < 2:
            return None
        return any(varies(moved, d) for d in features)
