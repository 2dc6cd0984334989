"""Where the loops of a graph begin and end, and what they make."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.operations import collect, end_loop, segment


@dataclass(frozen=True)
class Loop:
    """`pieces`: its variables; `nodes`: what a turn does; `made`: the lists to which turns append; `end`: its last node."""

    pieces: list[fx.Node]
    nodes: list[fx.Node]
    made: list[fx.Node]
    end: fx.Node


def loops_of(graph: fx.Graph) -> dict[fx.Node, Loop]:
    """The loops of a graph by their first and last nodes."""
    found: dict[fx.Node, Loop] = {}
    nodes: list[fx.Node] = []  # since the first variable of a loop
    for node in graph.nodes:
        if node.target is end_loop:
            pieces = [n for n in nodes if n.target is segment]
            made = [user for n in nodes for user in n.users if user.target is collect]
            found[nodes[0]] = found[node] = Loop(pieces, nodes, made, node)
            nodes = []
        elif nodes or node.target is segment:
            nodes.append(node)
    return found


def late(node: fx.Node) -> PeftcError:
    """The error for an equation outside of a loop that reads what one turn of it has computed."""
    return PeftcError(
        Diagnostic(
            "P405",
            "a state is read behind the loop that computes it piece by piece",
            notes=(
                f"the state is the result of `{node.target}` in {node.meta.get('origin', ('?',))[0] or 'the region'}",
            ),
        )
    )
