"""Edits where the model's own code switches gradients off: they would compute, and never learn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.context_managers import is_gradient_context
from peftc.tracing.operations import enter_context, exit_context


def check_gradients(written: Iterable[tuple[str, Sequence[fx.Node]]], graph: fx.Graph) -> None:
    """Raises P416 for a state, by name, all of whose nodes are in blocks without gradients."""
    off = without_gradients(graph)
    for name, nodes in written:
        if off.issuperset(nodes):
            raise PeftcError(
                Diagnostic(
                    "P416",
                    f"the model uses `{name}` here without gradients: no parameter of the edit would learn",
                    notes=(
                        f"`{nodes[0].target}` stands inside of a `with torch.no_grad()` block of the model's own code",
                    ),
                    help="edit a state outside of that block",
                )
            )


def without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """What is computed inside of blocks that switch gradients off."""
    off: list[bool] = []
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is enter_context and is_gradient_context(node):
            off.append(switches_off(node))
        elif node.target is exit_context and isinstance(begin := node.args[0], fx.Node) and is_gradient_context(begin):
            off.pop()
        elif off and off[-1]:
            found.add(node)
    return found


def switches_off(begin: fx.Node) -> bool:
    kind, *given = begin.args
    mode = given[0] if given else begin.kwargs.get("mode", True)
    return kind is torch.no_grad or (kind is torch.set_grad_enabled and mode is False)
