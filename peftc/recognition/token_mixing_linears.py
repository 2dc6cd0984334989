"""Whether a Linear mixes tokens: one that is applied along them, to a value whose tokens have been put in the place of its
features.

As features are, tokens are numbered, and what the code does to their layout is done to the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from peftc.recognition.graph import nodes
from peftc.recognition.graph.feature_axis import features_dim
from peftc.recognition.graph.features import numbered
from peftc.recognition.graph.value_operands import value_operands
from peftc.recognition.residual_stream import Stream


def mixed_by_linears(body: set[fx.Node], stream: Stream, root: nn.Module) -> bool:
    """Whether a Linear of a sub-layer sums over tokens of the stream, (batch, tokens, d)."""
    numbers: dict[fx.Node, Any] = {}
    for node in sorted(body):
        shape = nodes.shape(node)
        if stream.holds(node):
            if len(shape) == 3 and features_dim(node, root) == 2:
                numbers[node] = torch.arange(shape[1])[None, :, None].expand(shape)
            continue
        given = [n for n in value_operands(node) if n in numbers]
        if not given:
            continue
        if not nodes.is_linear(node, root):
            made = numbered(node, given[:1], numbers)
            numbers |= {node: made} if made is not None else {}
        elif isinstance(places := numbers[given[0]], torch.Tensor):
            if bool((places != places[..., :1]).any()):
                return True
            numbers[node] = places[..., :1].expand(shape)
    return False
