"""The residual stream of a layer: its input, and every sum that carries it on."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch import fx, nn

from peftc.fakes.tensors import tensors_in
from peftc.recognition.graph import nodes
from peftc.recognition.graph.value_operands import operation, value_operands
from peftc.recognition.hyper_connections import mixture
from peftc.tracing.in_place import new_version, writes_to


def stream_input(graph: fx.Graph) -> fx.Node | None:
    """The layer's hidden state: its first floating tensor argument. A layer that takes `*args` and `**kwargs` has it there."""
    values = [n for n in graph.nodes if n.op == "placeholder" or of_variadic(n)]
    for node in sorted(values, key=lambda n: n.op != "placeholder"):
        value = nodes.example(node)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return node
    return None


def of_variadic(node: fx.Node) -> bool:
    """Whether a node is one of the arguments in `*args` or `**kwargs`."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.op == "placeholder" and str(source.target).startswith("*")


# Nothing is left of the value before.
OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_", "normal_", "uniform_"})


class Stream:
    """What is the stream, and what only depends on it.

    `values`: the layer's input and the sums found so far. `opaque`: modules of the layer whose code could not be followed.
    """

    def __init__(self, first: fx.Node, root: nn.Module, opaque: Collection[str] = ()) -> None:
        self.values, self.root, self.opaque = [first], root, opaque

    def hides(self, node: fx.Node) -> bool:
        """Whether a node is the call of an opaque module that turns the stream into other hidden states."""
        return node.op == "call_module" and node.target in self.opaque and self.reaches(node) and gives_states(node)

    def holds(self, node: fx.Node) -> bool:
        """Whether `node` is the stream itself, but for norms, dropout, casts, clamps, constant factors and terms, and a choice
        of tokens; of several streams side by side, a mixture.
        """
        while node not in self.values:
            before = nodes.passes_through(node, self.root) or self.normed(node) or self.scaled(node) or part(node)
            before = before or self.shifted(node) or self.mixed(node) or partly(node)
            if before is None:
                return False
            node = before
        return True

    def normed(self, node: fx.Node) -> fx.Node | None:
        return nodes.first_input(node) if nodes.is_norm(node, self.root) else None

    def scaled(self, node: fx.Node) -> fx.Node | None:
        """The value that is multiplied by a number or by a parameter."""
        if not nodes.is_scaling(node):
            return None
        made = [a for a in node.args if isinstance(a, fx.Node) and self.reaches(a)]
        return made[0] if len(made) == 1 else None

    def shifted(self, node: fx.Node) -> fx.Node | None:
        """The value that a parameter is added to."""
        operands = [a for a in node.args if isinstance(a, fx.Node)] if nodes.is_add(node) else []
        others = [a for a in operands if a.op != "get_attr"]
        return others[0] if len(others) == 1 and len(operands) == 2 else None

    def mixed(self, node: fx.Node) -> fx.Node | None:
        """The streams that `node` mixes."""
        return next(filter(self.holds, mixture(node)), None)

    def body(self, h: fx.Node) -> set[fx.Node]:
        """Everything that `h` is computed from, back to the stream (that included)."""
        return set(nodes.upstream(h, self.holds))

    def reaches(self, node: fx.Node) -> bool:
        """Whether `node` depends on the stream."""
        return any(n in self.values for n in nodes.upstream(node, lambda n: n in self.values))

    def entry(self, body: set[fx.Node], root: nn.Module) -> fx.Node | None:
        """Where a sub-layer takes the stream in: what the first of its operations reads, behind the norm."""
        for node in sorted(body):
            if self.holds(node):
                continue
            taken = [a for a in value_operands(node) if a in body and nodes.is_tensor(a) and self.holds(a)]
            if taken:
                return taken[0]
        return None


def partly(node: fx.Node) -> fx.Node | None:
    """The tensor that was changed in place, in part or through a view, where that is no sum and no value of its own."""
    before = nodes.first_input(node)
    if node.target is new_version:
        return before
    inside = before is not None and nodes.is_tensor(node) and writes_to(node, nodes.example(before))
    return before if inside and not nodes.is_add(node) and operation(node) not in OVERWRITES else None


def gives_states(node: fx.Node) -> bool:
    """Whether any result of a call is a tensor of floating numbers: not of indices alone."""
    return any(value.is_floating_point() for value in tensors_in(nodes.example(node)))


def part(node: fx.Node) -> fx.Node | None:
    """The tensor of which `node` is some tokens, or one of several copies, with all features."""
    source = nodes.first_input(node) if node.target is operator.getitem else None
    before, after = nodes.shape(source), nodes.shape(node)
    if not before or not after or before[-1] != after[-1] or not isinstance(node.args[1], (int, slice, tuple)):
        return None
    key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    chosen = [k for k in key if isinstance(k, (int, slice, fx.Node))]
    all_features = len(chosen) < len(before) or chosen[-1] == slice(None)
    return source if all_features and len(chosen) == len(key) else None
