"""The hidden states of a site in the graph of its layer."""

from __future__ import annotations

import torch
from torch import fx

from peftc.rewriting.anchors import Anchor, anchors, calls_of, contains, parts, relative
from peftc.rewriting.edits import STREAM
from peftc.tracing.sites import INPUT, OUTPUT, Site, State
from peftc.tracing.tracer import Traced


def state_of(site: Site, name: str) -> State:
    return site.stream if name == STREAM and site.stream is not None else site.states[name]


def node_of(state: State, layer: str, site: Site, traced: Traced) -> fx.Node:
    """The node of a state in its layer's graph; for a state of an attention call, the call."""
    assert state.place is not None
    name = state.place.node.partition(".")[0]
    if name in (INPUT, OUTPUT):
        return boundary_node(name, relative(site.module, layer), traced)
    return next(n for n in traced.graph.nodes if n.name == name)


def boundary_node(place: str, module: str, traced: Traced) -> fx.Node:
    """The first tensor that a module in a layer takes, or returns."""
    call = next(c for c in calls_of(traced) if c.name == module)
    found = parts(call.arguments if place == INPUT else call.result)
    return next(n for _, n in found if isinstance(n.meta.get("example"), torch.Tensor))


def state_anchors(state: State, layer: str, site: Site, traced: Traced) -> list[Anchor]:
    assert state.place is not None
    argument = state.place.node.partition(".")[2]
    node = node_of(state, layer, site, traced)
    if argument:
        also = [next(n for n in traced.graph.nodes if n.name == name) for name in state.place.also]
        frame, operation, n = node.meta["origin"]
        return [Anchor("argument", frame, (operation, n, argument, *(other.meta["origin"][1:] for other in also)))]
    return anchors(node, traced)


def may_write(anchor: Anchor, frames: frozenset[str], node: fx.Node) -> bool:
    """Whether a new value there is what everyone who uses the state gets."""
    if anchor.kind == "argument":
        return True
    inside = [u for u in node.users if contains(anchor.module, owner(u))]
    if anchor.kind == "in":
        return bool(anchor.module) and len(inside) == len(node.users)
    if anchor.kind == "out" and not frames:  # written as it leaves the region
        return not inside or not anchor.module
    return node.op != "placeholder"


def owner(node: fx.Node) -> str:
    """The module whose code uses the inputs of `node`: a leaf module itself, else the frame that ran it."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("origin", ("",))[0])
