"""The states of a site: nodes, anchors and uses in its layer's graph; in-place writes to them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import fx, nn

from peftc.addressing.paths import stack_steps
from peftc.addressing.sites import INPUT, OUTPUT, ActivationRef, Site, State, parameter_name
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.nodes import EDIT, example, first_input, is_edit, parts, shape
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.recognition.layer_types import LayerType
from peftc.recognition.stack_names import sub_layer_steps
from peftc.rewriting.anchors import (
    Anchor,
    anchors,
    callers_of,
    calls_of,
    contains,
    find,
    operand,
    ordinal,
    origin,
    product_anchor,
    products,
    relative,
)
from peftc.rewriting.edits import STREAM, RegionEdit, RegionState
from peftc.tracing.bytecode import may_diverge
from peftc.tracing.in_place import WRITES, storage_id, writes_to
from peftc.tracing.operations import new_version
from peftc.tracing.region_trace import RegionTrace

PASS = "pass"  # in the meta of the nodes of a pass, which read what is there when it runs
COPY = "copy"  # in place of a number, in the origin of a copy
REPLACES = "replaces"  # in the meta of an edit's node: the state whose value, with all its views, it replaces


def state_of(site: Site, name: str) -> State:
    return site.layer_input if name == STREAM and site.layer_input is not None else site.states[name]


def activation_of(state: State) -> ActivationRef:
    assert state.activation is not None
    return state.activation


def steps_below_layer(site: Site) -> tuple[tuple[str, int | None], ...]:
    return site.steps[stack_steps([name for name, _ in site.steps]) + 1 :]


def node_of(state: State, layer: str, site: Site, trace: RegionTrace) -> fx.Node:
    """The node of a state in its layer's graph; for a state of an attention call, the call."""
    name = activation_of(state).node.partition(".")[0]
    if name not in (INPUT, OUTPUT):
        return node_named(name, trace)
    module = relative(site.module, layer)
    call = next(c for c in calls_of(trace) if c.name == module)
    nodes = (n for _, n in parts(call.arguments if name == INPUT else call.result))
    return next(n for n in nodes if isinstance(n.meta.get("example"), torch.Tensor))


def node_named(name: str, trace: RegionTrace) -> fx.Node:
    return next(n for n in trace.graph.nodes if n.name == name)


def state_anchors(state: State, layer: str, site: Site, trace: RegionTrace) -> list[Anchor]:
    """All anchors of a state; one for a state of an attention call."""
    activation = activation_of(state)
    argument = activation.node.partition(".")[2]
    node = node_of(state, layer, site, trace)
    if (product := product_of(state, site, node, trace)) is not None:
        return [product]
    if not argument:
        return anchors(node, trace)
    others = (ordinal(node_named(name, trace), trace) for name in activation.other_nodes)
    return [Anchor("argument", origin(node)[0], (*ordinal(node, trace), argument, *others))]


def definitions(state: State, layer: str, site: Site, kind: LayerType) -> tuple[list[Anchor], list[Anchor]]:
    """The anchors that define a state, and a use of the layer's that must read it besides.

    The `x` and `h` of a Linear or a norm are its input and output. The `x` of a sub-layer is the
    input of its first Linears, `c` that of keys and values, `z` and the `h` of `hidden` that of
    `down`, and `res` the operand of the sum with `h`. Other states have no definition.
    """
    activation, trace = activation_of(state), kind.traced
    node = node_of(state, layer, site, trace)
    if "." in activation.node or activation.node in (INPUT, OUTPUT):
        return [], []
    aliases = anchors(node, trace)
    module = relative(site.module, layer)
    boundary = [a for a in aliases if a.module == module and a.kind == ("out" if node.target == module else "in")]
    if boundary and any(n.op == "call_module" and n.target == module for n in trace.graph.nodes):
        return boundary, []
    if (product := product_of(state, site, node, trace)) is not None:
        return [product], []
    steps = steps_below_layer(site)
    own = steps[:-1] if steps[-1:] in ((("hidden", None),), (("add", None),)) else steps
    subs = zip(kind.subs, sub_layer_steps(kind.subs), strict=True)
    sub = next((sub for sub, path in subs if path == own), None)
    if sub is None:
        return [], []
    if node is sub.add:
        return [a for a in aliases if a.kind == "node"], []
    if state.name in ("h", "res") and node in sub.add.args:
        summand = [operand(node, sub.add, trace)]
        return (summand, []) if state.name == "res" else ([], summand)
    roles = {"x": ("q",) if sub.kind == "attn" else (), "c": ("k", "v")}.get(state.name, ("down",))
    projections = [sub.projections[role].node for role in roles if role in sub.projections]
    linears = projections or [n for n in sub.body if kind.layer.is_linear(n) and state.name == "x"]
    bare = [p for n in linears if (p := kind.layer.product(n)) is not None and p.x is node]
    if bare:
        return [product_anchor("x", p, p.weight.rows) for p in bare], []
    readers = {str(n.target) for n in linears if first_input(n) is node}
    return [a for a in aliases if a.kind == "in" and a.module in readers], []


def product_of(state: State, site: Site, node: fx.Node, trace: RegionTrace) -> Anchor | None:
    """The anchor of `x` or `h` of a parameter that code multiplies by, if it does so once."""
    weight = site.states["w"].weight if site.bare and site.calls == 1 else None
    if weight is None or state.name not in ("x", "h"):
        return None
    name = relative(parameter_name(weight), site.root)
    graph = LayerGraph(trace.graph, nn.Module() if trace.root is None else trace.root)
    every = [p for n in trace.graph.nodes if (p := graph.product(n)) is not None and p.weight.parameter == name]
    own = [p for p in every if p.weight.place_of(weight.rows)[0] and (p.x if state.name == "x" else p.result) is node]
    return product_anchor(state.name, own[0], weight.rows) if own else None


def aliases_may_diverge(anchor: Anchor, other: Anchor, trace: RegionTrace) -> bool:
    """Whether some call may compute another value between two anchors of one value."""
    first, second = code_path(anchor, trace), code_path(other, trace)
    while first and second and first[0] == second[0]:
        del first[0], second[0]
    pairs = [(first.pop(0), second.pop(0))] if first and second else []
    for end, positions in ((anchor, first), (other, second)):
        pairs += [("", position) if end.kind != "out" else (position, "") for position in positions]
    return any(may_diverge(start, stop) for start, stop in pairs)


def code_path(anchor: Anchor, trace: RegionTrace) -> list[str]:
    """The positions in the code of nested modules that lead to an anchor, outermost first."""
    callers = callers_of(trace)
    name = anchor.module
    positions = [] if anchor.kind in ("in", "out") else [anchor.position]
    while name in callers:
        name, position = callers[name]
        positions.insert(0, position)
    return positions


def may_write(anchor: Anchor, frames: frozenset[str], node: fx.Node) -> bool:
    """Whether all uses of a state read a new value at an anchor, if `frames` are entered."""
    if anchor.kind == "argument":
        return True
    if anchor.kind == "product" and anchor.key[0] == "x":
        return False  # other products may read it
    if anchor.kind == "in":  # the module may write to it in place, for uses outside
        users = {user for version in later_versions(node) for user in version.users}
        return bool(anchor.module) and all(contains(anchor.module, user_module(user)) for user in users)
    if anchor.kind == "out" and anchor.module not in frames:  # the new value is written behind the module's code
        if not anchor.module:
            return True
        inside = any(contains(anchor.module, user_module(user)) for user in node.users)
        earlier = earlier_versions(node)
        return not inside and all(n.op != "placeholder" and contains(anchor.module, user_module(n)) for n in earlier)
    return node.op != "placeholder"


def is_overwritten(anchor: Anchor, region: str, node: fx.Node) -> bool:
    """Whether the code of a region writes in place to a state that is its argument."""
    own = anchor.kind == "in" and anchor.module == region
    return own and any(contains(region, user_module(writer)) for writer in later_writes(node))


def user_module(node: fx.Node) -> str:
    """The module whose code reads the operands of a node."""
    return str(node.target) if node.op == "call_module" else str(node.meta.get("origin", ("",))[0])


class StateLookup:
    """The nodes of states in one trace.

    The anchors that define a state decide: the `x` of a Linear is its operand, however this call
    computes it. If this trace has none of them, all aliases have to identify one node.
    """

    def __init__(self, trace: RegionTrace) -> None:
        self.trace = trace
        self.nodes: dict[RegionState, list[fx.Node]] = {}
        self.states: dict[RegionState, RegionState] = {}  # as they are in the trace

    def resolve(self, edits: Iterable[RegionEdit]) -> None:
        """Looks up all states first: an edit may replace what identifies the state of the next."""
        for name, state in (item for edit in edits for item in edit.states.items()):
            kind = "" if state.anchor is None else state.anchor.kind
            if kind in ("in", "out", "node", "ids", "product") and state not in self.nodes:
                self.nodes[state] = self.candidates(state, name)
                self.states[state] = self.in_trace(state)

    def candidates(self, state: RegionState, name: str) -> list[fx.Node]:
        """The nodes of a state: none if not computed, several if its aliases diverged."""
        assert state.anchor is not None
        for places in (state.definitions, state.aliases or (state.anchor,)):
            nodes = [node for anchor in places if (node := find(anchor, self.trace)) is not None]
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

    def in_trace(self, state: RegionState) -> RegionState:
        """A state with the features of its node in this trace: code may compute more at once."""
        if state in self.states:
            return self.states[state]
        anchor = state.anchor
        if anchor is None or anchor.kind != "product" or not (matches := products(anchor, self.trace)):
            return state
        product, rows = matches[0]
        is_input = anchor.key[0] == "x"
        dims = product.d_in if is_input else product.d_out
        width = dims.width(shape(product.x if is_input else product.result))
        rows = None if is_input or rows is None or rows.width == width else rows
        return replace(state, rows=rows, size=width, dims=None if dims.is_plain else dims)

    def node_at(self, anchor: Anchor) -> fx.Node:
        """The attention call of an `argument`. Raises: P403 where this trace has no such call."""
        node = find(anchor, self.trace)
        if node is None:
            raise PeftcError(missing(anchor.key[2], anchor))
        return node


def missing(name: str, anchor: Anchor) -> Diagnostic:
    message = f"in this call, the model computes no `{name}` where the sample forward does"
    help_ = "compile with a `sample` like this call; the model has not been changed by it"
    return Diagnostic("P403", message, notes=(f"looked for {anchor}",), help=help_)


def closure(start: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> list[fx.Node]:
    """A node and all nodes that are reached from it, each once."""
    nodes, seen = [start], {start}
    for node in nodes:  # which grows
        new = [n for n in dict.fromkeys(neighbours(node)) if n not in seen]
        seen.update(new)
        nodes += new
    return nodes


def later_writes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that write to a value's memory after it was computed, through any alias."""
    value = value_of(node)
    storage = storage_id(value)
    if not storage or not any(WRITES in n.meta for n in node.graph.nodes):
        return

    def aliases(alias: fx.Node) -> list[fx.Node]:
        neighbours = [*alias.users, *([] if is_edit(alias) else alias.all_input_nodes)]
        return [n for n in neighbours if storage_id(value_of(n)) == storage and not (n in alias.users and is_edit(n))]

    users = (user for alias in closure(node, aliases) for user in alias.users if not is_edit(user))
    yield from (user for user in users if writes_to(user, value) and node < user)


def copy_operands_of_edits(graph: fx.Graph) -> None:
    """Lets edits read copies of values that the model overwrites later."""
    if not any(WRITES in node.meta for node in graph.nodes):
        return
    for node in list(graph.nodes):
        edits = [user for user in node.users if is_edit(user)]
        if edits and (not is_edit(node) or REPLACES in node.meta) and next(later_writes(node), None) is not None:
            copy = copy_value(node)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, edits=edits: user in edits)


def copy_value(node: fx.Node) -> fx.Node:
    """Adds a copy of a value directly behind its node."""
    last = node
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    with node.graph.inserting_after(last):
        copy = node.graph.call_method("clone", (node,))
    copy.meta["origin"] = (EDIT, COPY, 0)
    return copy


def value_of(node: fx.Node) -> object:
    return example(node.meta.get(REPLACES, node))


def later_versions(node: fx.Node) -> list[fx.Node]:
    """A node, and those that stand for the same tensor after in-place writes."""
    value = example(node)
    return closure(node, lambda n: [u for u in n.users if writes_to(u, value) or u.target is new_version])


def earlier_versions(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the same tensor before in-place writes."""
    storage = storage_id(example(node))

    def before(version: fx.Node) -> list[fx.Node]:
        is_version = WRITES in version.meta or version.target is new_version
        return [n for n in version.all_input_nodes if is_version and storage_id(example(n)) == storage]

    return closure(node, before)[1:]
