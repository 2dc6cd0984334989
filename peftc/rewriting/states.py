"""The hidden states of a site in the graph of its layer."""

from __future__ import annotations

import torch
from torch import fx

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import INPUT, OUTPUT, Site, State
from peftc.dataflow.nodes import first_input
from peftc.recognition.layers import LayerType
from peftc.recognition.roles import SubLayer
from peftc.recognition.site_builder import sub_layer_steps
from peftc.rewriting.anchors import (
    Anchor,
    anchors,
    callers_of,
    calls_of,
    contains,
    operand,
    ordinal,
    origin,
    parts,
    relative,
)
from peftc.rewriting.edits import STREAM
from peftc.rewriting.overwritten import earlier, later, writers
from peftc.tracing.code_positions import may_diverge
from peftc.tracing.region_trace import RegionTrace


def state_of(site: Site, name: str) -> State:
    return site.layer_input if name == STREAM and site.layer_input is not None else site.states[name]


def node_of(state: State, layer: str, site: Site, traced: RegionTrace) -> fx.Node:
    """The node of a state in its layer's graph; for a state of an attention call, the call."""
    assert state.activation is not None
    name = state.activation.node.partition(".")[0]
    if name in (INPUT, OUTPUT):
        return boundary_node(name, relative(site.module, layer), traced)
    return next(n for n in traced.graph.nodes if n.name == name)


def boundary_node(place: str, module: str, traced: RegionTrace) -> fx.Node:
    """The first tensor that a module in a layer takes, or returns."""
    call = next(c for c in calls_of(traced) if c.name == module)
    found = parts(call.arguments if place == INPUT else call.result)
    return next(n for _, n in found if isinstance(n.meta.get("example"), torch.Tensor))


def state_anchors(state: State, layer: str, site: Site, traced: RegionTrace) -> list[Anchor]:
    assert state.activation is not None
    argument = state.activation.node.partition(".")[2]
    node = node_of(state, layer, site, traced)
    if argument:
        also = [next(n for n in traced.graph.nodes if n.name == name) for name in state.activation.other_nodes]
        key = (*ordinal(node, traced), argument, *(ordinal(other, traced) for other in also))
        return [Anchor("argument", origin(node)[0], key)]
    return anchors(node, traced)


def definitions(state: State, layer: str, site: Site, kind: LayerType) -> tuple[list[Anchor], list[Anchor]]:
    """Anchors at which a state is what the language calls by its name; and those at which the layer has to take it besides.

    The `x` and `h` of a Linear or a norm are its input and its output; the `x` of a sub-layer is what its first Linears read, `c` what
    keys and values are made from, `z` and the `h` of `hidden` what `down` reads, `res` what is summed up with `h`. None of others.
    """
    assert state.activation is not None
    node, traced = node_of(state, layer, site, kind.traced), kind.traced
    if "." in state.activation.node or state.activation.node in (INPUT, OUTPUT):
        return [], []
    named = anchors(node, traced)
    own = relative(site.module, layer)
    bounds = [a for a in named if a.module == own and a.kind == ("out" if node.target == own else "in")]
    if bounds and any(n.op == "call_module" and n.target == own for n in traced.graph.nodes):
        return bounds, []
    sub = sub_layer_of(site, kind)
    if sub is None:
        return [], []
    if node is sub.add:
        return [a for a in named if a.kind == "node"], []
    if state.name in ("h", "res") and node in sub.add.args:
        taken = [operand(node, sub.add, traced)]
        return (taken, []) if state.name == "res" else ([], taken)
    readers = {str(n.target) for n in readers_of(state.name, node, sub, kind)}
    return [a for a in named if a.kind == "in" and a.module in readers], []


def comes_apart(anchor: Anchor, other: Anchor, traced: RegionTrace) -> bool:
    """Whether calls may exist in which code makes another value of what one anchor names before it gets to the other."""
    first, second = way(anchor, traced), way(other, traced)
    while first and second and first[0] == second[0]:
        del first[0], second[0]
    between = [(first.pop(0), second.pop(0))] if first and second else []
    ends = [
        ("", place) if end.kind != "out" else (place, "")
        for end, own in ((anchor, first), (other, second))
        for place in own
    ]
    return any(may_diverge(*two) for two in (*between, *ends))


def way(anchor: Anchor, traced: RegionTrace) -> list[str]:
    """The places in the code of one module after the other, from the outermost on, on the way to an anchor."""
    callers = callers_of(traced)
    within = anchor.kind in ("in", "out")
    name, places = anchor.module, [] if within else [anchor.key[1].place]
    while name in callers:
        name, place = callers[name]
        places.insert(0, place)
    return places


def sub_layer_of(site: Site, kind: LayerType) -> SubLayer | None:
    """The sub-layer whose states those of a site are."""
    steps = site.steps[stack_steps([name for name, _ in site.steps]) + 1 :]
    own = steps[:-1] if steps[-1:] in ((("hidden", None),), (("add", None),)) else steps
    return next((sub for sub, named in zip(kind.subs, sub_layer_steps(kind.subs), strict=True) if named == own), None)


def readers_of(name: str, node: fx.Node, sub: SubLayer, kind: LayerType) -> list[fx.Node]:
    """The Linears that a state of a sub-layer is made for, those that read this node."""
    roles = {"x": ("q",) if sub.kind == "attn" else (), "c": ("k", "v")}.get(name, ("down",))
    played = [sub.projections[role].node for role in roles if role in sub.projections]
    nodes = played or [n for n in sub.body if kind.layer.is_linear(n) and name == "x"]
    return [n for n in nodes if first_input(n) is node]


def may_write(anchor: Anchor, frames: frozenset[str], node: fx.Node) -> bool:
    """Whether a new value there is what everyone who uses the state gets."""
    if anchor.kind == "argument":
        return True
    inside = [u for u in node.users if contains(anchor.module, owner(u))]
    if anchor.kind == "in":
        users = {
            user for each in later(node) for user in each.users
        }  # it may be changed in there, for those outside, too
        return bool(anchor.module) and all(contains(anchor.module, owner(user)) for user in users)
    if anchor.kind == "out" and anchor.module not in frames:  # written behind its code
        own = anchor.module and any(not is_inside(each, anchor.module) for each in earlier(node))
        return not anchor.module or not (inside or own)
    return node.op != "placeholder"


def is_inside(node: fx.Node, module: str) -> bool:
    """Whether the code of a module, or of one in it, computes a value."""
    return node.op != "placeholder" and contains(module, owner(node))


def overwritten(anchor: Anchor, region: str, node: fx.Node) -> bool:
    """Whether the code of a region changes what it is given as a state: an edit behind that code reads a copy."""
    own = anchor.kind == "in" and anchor.module == region
    return own and any(contains(region, owner(writer)) for writer in writers(node))


def owner(node: fx.Node) -> str:
    """The module whose code uses the inputs of `node`: a leaf module itself, else the frame that ran it."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("origin", ("",))[0])
