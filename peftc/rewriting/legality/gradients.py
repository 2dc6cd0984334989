"""Refuses edits whose parameters the model would never train, as it disables gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.context_managers import is_gradient_context
from peftc.tracing.operations import enter_context, exit_context


def check_gradients(written: Mapping[str, Sequence[fx.Node]], graph: fx.Graph) -> None:
    """Raises: P416 for a state, by name, all of whose nodes run without gradients."""
    without = nodes_without_gradients(graph)
    for name, nodes in written.items():
        if nodes and without.issuperset(nodes):
            message = f"the model computes `{name}` without gradients, so no parameter of the edit would be trained"
            note = f"`{nodes[0].target}` is in a `with torch.no_grad()` block of the model's own code"
            raise PeftcError(Diagnostic("P416", message, notes=(note,), help="edit a state outside of that block"))


def nodes_without_gradients(graph: fx.Graph) -> set[fx.Node]:
    blocks: list[bool] = []
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is enter_context and is_gradient_context(node):
            context, *arguments = node.args
            mode = arguments[0] if arguments else node.kwargs.get("mode", True)
            blocks.append(context is torch.no_grad or (context is torch.set_grad_enabled and mode is False))
        elif node.target is exit_context and isinstance(begin := node.args[0], fx.Node) and is_gradient_context(begin):
            blocks.pop()
        elif blocks and blocks[-1]:
            nodes.add(node)
    return nodes
