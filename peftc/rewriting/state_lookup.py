"""Finds the states of edits in the trace of a call, which may differ from the sample."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.rewriting.anchors import Anchor, find
from peftc.rewriting.edits import STREAM, RegionEdit, RegionState
from peftc.tracing.region_trace import RegionTrace


class StateLookup:
    """The nodes of states in one trace.

    The anchors that define a state decide: the `x` of a Linear is its operand, however this call
    computes it. If this trace has none of them, all aliases have to identify one node.
    """

    def __init__(self, trace: RegionTrace) -> None:
        self.trace = trace
        self.nodes: dict[RegionState, list[fx.Node]] = {}

    def resolve(self, edits: Iterable[RegionEdit]) -> None:
        """Looks up all states first: an edit may replace what identifies the state of the next."""
        for name, state in (item for edit in edits for item in edit.states.items()):
            if state.anchor is not None and state.anchor.kind in ("in", "out", "node") and state not in self.nodes:
                self.nodes[state] = self.candidates(state, name)

    def candidates(self, state: RegionState, name: str) -> list[fx.Node]:
        """The nodes of a state: none if not computed, several if its aliases diverged."""
        assert state.anchor is not None
        for anchors in (state.definitions, state.aliases or (state.anchor,)):
            nodes = [node for anchor in anchors if (node := find(anchor, self.trace)) is not None]
            if nodes:
                return list(dict.fromkeys(nodes if name != STREAM else nodes[:1]))
        return []

    def node_of(self, state: RegionState, name: str) -> fx.Node:
        """Raises: P403 where this call computes no such state, or several."""
        assert state.anchor is not None
        nodes = self.nodes[state] if state in self.nodes else self.candidates(state, name)
        if not nodes:
            raise PeftcError(missing(name, state.anchor))
        if len(nodes) > 1:
            message = f"the sample forward has one value `{name}` here, and this call has several"
            notes = tuple(f"it was {anchor}" for anchor in state.definitions or state.aliases)
            help_ = "compile with a `sample` that has the arguments of this call"
            raise PeftcError(Diagnostic("P403", message, notes=notes, help=help_))
        return nodes[0]

    def node_at(self, anchor: Anchor) -> fx.Node:
        """The attention call of an `argument`. Raises: P403 where this trace has no such call."""
        node = find(anchor, self.trace)
        if node is None:
            raise PeftcError(missing(anchor.key[2], anchor))
        return node


def missing(name: str, anchor: Anchor) -> Diagnostic:
    message = f"in this call, the model computes no `{name}` where the sample forward does"
    help_ = "report the model and the call; the model has not been changed by this call"
    return Diagnostic("P403", message, notes=(f"looked for {anchor}",), help=help_)
