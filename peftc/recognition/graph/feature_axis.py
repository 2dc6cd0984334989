"""Where the features of a value are: in its last dimension, or in its second where it is an image or a sound as convolutions
have it, (batch, d, height, width).
"""

from __future__ import annotations

import inspect

import torch
from torch import fx, nn

from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import value_operands, value_users

_SECOND = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)
_LAST = (nn.Linear, nn.LayerNorm)
_MOVES = frozenset({"permute", "transpose", "movedim", "swapaxes", "flatten"})


def features_dim(node: fx.Node, root: nn.Module) -> int:
    """The dimension of the features of a value in the graph of a layer."""
    last = max(0, len(nodes.shape(node)) - 1)
    if last < 2 or not any(isinstance(m, _SECOND) for m in root.modules()):
        return last
    made = made_at(node, root, set())
    made = taken_at(node, root, set()) if made is None else made
    return last if made is None else made


def made_at(node: fx.Node, root: nn.Module, seen: set[fx.Node]) -> int | None:
    """The dimension of the features as what makes a value tells it."""
    seen.add(node)
    own = layer_dim(node, root)
    if own is not None:
        return own
    for source in value_operands(node):
        if source in seen or not moves(source, node):
            continue
        before = made_at(source, root, seen)
        if before is None and source.op == "placeholder":
            before = taken_at(source, root, {*seen, node})
        if before is not None:
            return moved(source, node, before)
    return None


def taken_at(node: fx.Node, root: nn.Module, seen: set[fx.Node]) -> int | None:
    """The same as what takes the value tells it."""
    seen.add(node)
    for user in value_users(node):
        if user in seen or not nodes.is_tensor(user):
            continue
        if user.op == "call_module" and nodes.first_input(user) is node and (own := layer_dim(user, root)) is not None:
            return own
        if moves(node, user) and (after := taken_at(user, root, seen)) is not None:
            places = [moved(node, user, dim) for dim in range(len(nodes.shape(node)))]
            return places.index(after) if places.count(after) == 1 else None
    return None


def layer_dim(node: fx.Node, root: nn.Module) -> int | None:
    """Where a layer has the features of what it takes and returns."""
    module, shape = nodes.module_of(node, root), nodes.shape(node)
    if isinstance(module, _SECOND):
        return 1
    if isinstance(module, nn.LayerNorm) and inspect.unwrap(type(module).forward) is not nn.LayerNorm.forward:
        places = [dim for dim in {1, len(shape) - 1} if shape[dim] == module.normalized_shape[-1]]
        return places[0] if len(places) == 1 else None  # it may move them itself
    return len(nodes.shape(node)) - 1 if isinstance(module, _LAST) or nodes.is_linear(node, root) else None


def moves(source: fx.Node, node: fx.Node) -> bool:
    """Whether a value has the features of another, at this or another place."""
    if not nodes.is_tensor(source) or not nodes.is_tensor(node):
        return False
    return nodes.shape(source) == nodes.shape(node) or word(node) in _MOVES


def moved(source: fx.Node, node: fx.Node, dim: int) -> int | None:
    """Where a dimension of a value is in another that is made of it."""
    if word(node) not in _MOVES:
        return dim
    sizes = [1009 + 2 * i for i in range(len(nodes.shape(source)))]  # all different, and no product of others
    given = torch.empty(sizes, device="meta")
    args = [given if a is source else nodes.example(a) if isinstance(a, fx.Node) else a for a in node.args]
    try:
        result = getattr(torch.Tensor, word(node))(*args, **node.kwargs)
    except (TypeError, RuntimeError, IndexError):
        return None
    return list(result.shape).index(sizes[dim]) if sizes[dim] in result.shape else None


def word(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
