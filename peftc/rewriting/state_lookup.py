"""Finds the states of edits in the trace of one call, which may go another way through the code than the call that was analysed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.rewriting.anchors import Anchor, find
from peftc.rewriting.edits import STREAM, Bound, RegionEdit
from peftc.tracing.region_trace import RegionTrace


class Lookup:
    """The nodes of states in one trace.

    What defines a state comes first: the `x` of a Linear is what it takes, whatever that is made of in this call. Where a state has
    no such anchor here, all others have to name one node.
    """

    def __init__(self, traced: RegionTrace) -> None:
        self.traced = traced
        self.nodes: dict[Bound, list[fx.Node]] = {}

    def prepare(self, edits: Iterable[RegionEdit]) -> None:
        """Finds the states of edits before the first is inserted, which may write what the next one's are told by."""
        for name, bound in (item for edit in edits for item in edit.states.items()):
            if bound.anchor is not None and bound.anchor.kind in ("in", "out", "node") and bound not in self.nodes:
                self.nodes[bound] = self.named(bound, name)

    def named(self, bound: Bound, name: str) -> list[fx.Node]:
        """The nodes of a state: one, none where this call does not compute it, several where its anchors come apart."""
        assert bound.anchor is not None
        for anchors in (bound.defining, bound.also or (bound.anchor,)):
            nodes = [node for anchor in anchors if (node := find(anchor, self.traced)) is not None]
            if nodes:
                return list(dict.fromkeys(nodes if name != STREAM else nodes[:1]))
        return []

    def state(self, bound: Bound, what: str) -> fx.Node:
        """The node of a state.

        Raises: P403 where this call computes none, or several.
        """
        assert bound.anchor is not None
        nodes = self.nodes[bound] if bound in self.nodes else self.named(bound, what)
        if not nodes:
            raise PeftcError(missing(what, bound.anchor))
        if len(nodes) > 1:
            raise PeftcError(several(what, bound))
        return nodes[0]

    def at(self, anchor: Anchor, what: str) -> fx.Node:
        """The node that an anchor names.

        Raises: P403 where this call has none.
        """
        node = find(anchor, self.traced)
        if node is None:
            raise PeftcError(missing(what, anchor))
        return node


def missing(what: str, anchor: Anchor) -> Diagnostic:
    return Diagnostic(
        "P403",
        f"in this call pattern the model computes no `{what}` where its layer was analysed",
        notes=(f"looked for {anchor}",),
        help="report the model and the call; the model has not been changed by this call",
    )


def several(what: str, bound: Bound) -> Diagnostic:
    return Diagnostic(
        "P403",
        f"in this call pattern what was one value, `{what}`, where its layer was analysed is several",
        notes=tuple(f"it was {anchor}" for anchor in bound.defining or bound.also),
        help="give a `sample` with the arguments of this call when the model is compiled",
    )
