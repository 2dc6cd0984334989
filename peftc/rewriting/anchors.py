"""Anchors: code positions that identify a state in any trace of the same code.

A value can have several anchors: the output of a Linear may also be the result of its parent. An
anchor is a boundary of a module (an argument, a part of the result), or an operation of a module's
own code at a position there. Anchors do not change when other children are inlined, or between
training, evaluation and decoding. Aliases diverge where an optional argument inserts an operation
between them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal, TypeVar

from torch import fx, nn

from peftc.addressing.sites import Slice
from peftc.dataflow.layer_graph import LayerGraph
from peftc.dataflow.matrices import MatrixProduct
from peftc.dataflow.nodes import parts
from peftc.tracing.bytecode import Occurrence, Origin
from peftc.tracing.region_trace import ModuleCall, RegionTrace

T = TypeVar("T")


@dataclass(frozen=True)
class Ordinal:
    """One of the operations of one kind that a module runs; `occurrences` are all of them."""

    index: int
    occurrences: tuple[Occurrence, ...]

    @property
    def position(self) -> str:
        return self.occurrences[self.index][0]

    def find_in(self, occurrences: Sequence[Occurrence]) -> int | None:
        """The index of this operation in another trace: the one at the same code position.

        Else the same index, if both traces have as many, and common ones at equal indices.
        """
        own = self.occurrences[self.index]
        if own in occurrences and self.runs(self.occurrences) == self.runs(occurrences):
            return occurrences.index(own)
        if len(occurrences) != len(self.occurrences):
            return None
        pairs = zip(self.occurrences, occurrences, strict=True)
        return self.index if all(mine == other for mine, other in pairs if other in self.occurrences) else None

    def runs(self, occurrences: Sequence[Occurrence]) -> int:
        return sum(position == self.position for position, _ in occurrences)

    def __str__(self) -> str:
        return f"{self.index + 1} of {len(self.occurrences)}, at {self.position}"


Kind = Literal["in", "out", "node", "ids", "operand", "product", "argument", "tokens", "context", "positions", "offset"]


@dataclass(frozen=True)
class Anchor:
    """A code position in `module`. What `key` is depends on `kind`:

    - `in`: (parameter, *path), an argument of the module; `out`: a path into its result;
    - `node`: (operation, ordinal), the result of an operation in the module's code;
    - `ids`: what the module's code reads the table of an embedding, its own weight, at;
    - `operand`: (operation, ordinal, argument index), an operand of one;
    - `product`: (x or h, position, module, *parameter): what a product with these rows of a
      parameter reads or computes, wherever, and whichever rows the code multiplies by at once.
      `module` runs the product, and the module of the anchor may add the bias;
    - `argument`: (operation, ordinal, name, *(operation, ordinal)), the q, k, v or kv of an
      attention call, and of further calls that read the same value;
    - `tokens`: (embedding, whether the result keeps the prompt), the input of a stack;
    - `context`: the states that a stack attends to; `positions`: the positions of a stack's tokens;
    - `offset`: (rows,), the position ids of a stack, which rows of its keys come before.
    """

    kind: Kind
    module: str
    key: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(map(str, self.key))} of `{self.module or 'the region'}`"

    @property
    def position(self) -> str:
        """The position in the code of its module, of an anchor at an operation."""
        return self.key[1] if self.kind == "product" else self.key[1].position

    def each(self) -> Iterator[Anchor]:
        """An `argument` anchor for each attention call by itself."""
        yield replace(self, key=self.key[:3])
        for operation, ordinal in self.key[3:]:
            yield replace(self, key=(operation, ordinal, self.key[2]))

    def relative(self, region: str) -> Anchor:
        """This anchor with names relative to `region`."""
        if self.kind == "product":
            state, position, module, parameter, *rest = self.key
            names = (relative(module, region), relative(parameter, region))
            return Anchor(self.kind, relative(self.module, region), (state, position, *names, *rest))
        target = str(self.key[0]).partition("call_module ")[2] if self.kind in ("node", "operand") else ""
        # a target inside the calling module is relative to that module already
        is_absolute = target.startswith(f"{region}.")
        key = (f"call_module {relative(target, region)}", *self.key[1:]) if is_absolute else self.key
        return Anchor(self.kind, relative(self.module, region), key)


def relative(name: str, region: str) -> str:
    """A dotted name relative to a module that contains it."""
    return name if not region else name[len(region) + 1 :]


def contains(region: str, name: str) -> bool:
    return not region or name == region or name.startswith(region + ".")


def value_at(value: Any, path: tuple[Any, ...]) -> fx.Node | None:
    """The node at a path of nested values; results of nodes are indexed in the graph."""
    for key in path:
        if isinstance(value, fx.Node):
            value = item_of(value, key)
            continue
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, fx.Node) else None


def item_of(node: fx.Node, key: Any) -> fx.Node:
    """The only node that reads `key` from the result of `node`; duplicates are merged."""
    items = [u for u in node.users if u.target is operator.getitem and u.args[1] == key]
    for duplicate in items[1:]:
        duplicate.replace_all_uses_with(items[0])
    if items:
        return items[0]
    with node.graph.inserting_after(node):
        return node.graph.call_function(operator.getitem, (node, key))


def remembered(function: Callable[[RegionTrace], T]) -> Callable[[RegionTrace], T]:
    """A function of a trace that is computed once, if the graph does not change."""

    @wraps(function)
    def result(trace: RegionTrace) -> T:
        if trace.memory is None:
            return function(trace)
        if (function,) not in trace.memory:
            trace.memory[function,] = function(trace)
        return trace.memory[function,]

    return result


@remembered
def calls_of(trace: RegionTrace) -> list[ModuleCall]:
    """The modules that are called once, including the region itself."""
    counts = Counter(c.name for c in trace.calls)
    placeholders = {str(n.target).lstrip("*"): n for n in trace.graph.nodes if n.op == "placeholder"}
    result = trace.graph.output_node().args[0] if trace.result is None else trace.result
    called = (c for c in trace.calls if counts[c.name] == 1)
    return [*called, ModuleCall("", "", placeholders, result, inlined=True)]


@remembered
def weight_only_linears(trace: RegionTrace) -> dict[str, fx.Node]:
    """The Linears whose weights the code around them uses, once, instead of calling them."""
    calls = {c.name for c in trace.calls}
    nodes = [n for n in trace.graph.nodes if n.op == "call_module" and n.target not in calls and "origin" in n.meta]
    counts = Counter(n.target for n in nodes)
    return {str(n.target): n for n in nodes if counts[n.target] == 1}


@remembered
def callers_of(trace: RegionTrace) -> dict[str, tuple[str, str]]:
    """For each module, the module whose code calls it, and the position in that code."""
    linears = {name: (origin(n)[0], origin(n)[2][0]) for name, n in weight_only_linears(trace).items()}
    return linears | {c.name: (c.caller, c.position) for c in trace.calls}


def frames_between(region: str, anchor: Anchor, trace: RegionTrace) -> frozenset[str] | None:
    """The modules to enter from `region` to reach an anchor; None if it is not inside `region`."""
    callers = {name: caller for name, (caller, _) in callers_of(trace).items()}
    at_boundary = anchor.kind in ("in", "out")
    if at_boundary and anchor.module == region:
        return frozenset()
    if not contains(region, anchor.module):
        return None
    # Seen in: no transformers model, but Megatron, whose Linears return a bias for others to add
    inner = {anchor.key[2]} if anchor.kind == "product" else set[str]()
    frames = set[str]()
    for frame in {callers.get(anchor.module, "") if at_boundary else anchor.module, *inner}:
        if not contains(region, frame):
            return None
        frames.add(frame)
        while frame != region:
            if frame not in callers or not contains(region, callers[frame]):
                return None
            frame = callers[frame]
            frames.add(frame)
    return frozenset(frames)


def anchors(node: fx.Node, trace: RegionTrace) -> list[Anchor]:
    """All anchors of a node's value."""
    key = (anchors, node)
    if trace.memory is None:
        return _anchors(node, trace)
    if key not in trace.memory:
        trace.memory[key] = _anchors(node, trace)
    return list(trace.memory[key])


def _anchors(node: fx.Node, trace: RegionTrace) -> list[Anchor]:
    result: list[Anchor] = []
    for call in calls_of(trace):
        result += [Anchor("in", call.name, path) for path, n in parts(call.arguments) if is_value(n, node)]
        result += [Anchor("out", call.name, path) for path, n in parts(call.result) if n is node]
    for name, linear in weight_only_linears(trace).items():
        result += [Anchor("in", name, ("input",))] if linear.args[0] is node else []
        result += [Anchor("out", name)] if linear is node else []
    calls = [c for c in trace.calls if node.op == "call_module" and c.name == node.target]
    if node.op not in ("placeholder", "call_module") or (node.op == "call_module" and len(calls) != 1):
        result.append(Anchor("node", origin(node)[0], ordinal(node, trace)))
    return result


def product_anchor(state: str, product: MatrixProduct, rows: Slice | None) -> Anchor:
    """The anchor of what a product with a parameter reads or computes."""
    frame, _, (position, _) = origin(product.result)
    inner, _, _ = origin(product.node)
    return Anchor("product", frame, (state, position, inner, product.weight.parameter, product.weight.layout, rows))


def products(anchor: Anchor, trace: RegionTrace) -> list[tuple[MatrixProduct, Slice | None]]:
    """The products of a `product` anchor in a trace, and which of their features it names."""
    _, _, _, parameter, layout, rows = anchor.key
    graph = LayerGraph(trace.graph, nn.Module() if trace.root is None else trace.root)
    every = (p for node in trace.graph.nodes if (p := graph.product(node)) is not None)
    parts = [
        (p, p.weight.place_of(rows)) for p in every if (p.weight.parameter, p.weight.layout) == (parameter, layout)
    ]
    return [(p, place) for p, (is_inside, place) in parts if is_inside]


def is_value(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are one value; each read of an attribute has a node of its own."""
    return one is other or (one.op == other.op == "get_attr" and one.target == other.target)


def ordinal(node: fx.Node, trace: RegionTrace) -> tuple[str, Ordinal]:
    """A node's kind of operation, and its ordinal."""
    frame, operation, occurrence = origin(node)
    occurrences = tuple(origin(n)[2] for n in operations(frame, operation, trace))
    return operation, Ordinal(occurrences.index(occurrence), occurrences)


def operand(node: fx.Node, user: fx.Node, trace: RegionTrace) -> Anchor:
    return Anchor("operand", origin(user)[0], (*ordinal(user, trace), user.args.index(node)))


def origin(node: fx.Node) -> Origin:
    return node.meta["origin"]


def operations(frame: str, operation: str, trace: RegionTrace) -> list[fx.Node]:
    return [n for n in trace.graph.nodes if n.meta.get("origin", ())[:2] == (frame, operation)]


def find(anchor: Anchor, trace: RegionTrace) -> fx.Node | None:
    """The node that an anchor identifies in this trace; None where the trace has no such value."""
    if anchor.kind in ("in", "out"):
        call = next((call for call in calls_of(trace) if call.name == anchor.module), None)
        if call is None:
            return find_weight_only(anchor, trace)
        return value_at(call.arguments if anchor.kind == "in" else call.result, anchor.key)
    if anchor.kind == "product":
        values = [p.x if anchor.key[0] == "x" else p.result for p, _ in products(anchor, trace)]
        return values[0] if len(set(values)) == 1 else None
    if anchor.kind == "ids":
        return find_ids(anchor.module, trace)
    nodes = operations(anchor.module, anchor.key[0], trace)
    index = anchor.key[1].find_in([origin(n)[2] for n in nodes])
    node = None if index is None else nodes[index]
    return value_at(node.args, anchor.key[2:3]) if node is not None and anchor.kind == "operand" else node


def find_ids(module: str, trace: RegionTrace) -> fx.Node | None:
    """The ids at which the code of an embedding reads its weight, once."""
    name = f"{module}.weight".lstrip(".")
    lookups = [n for n in trace.graph.nodes if n.target is nn.functional.embedding]
    reads = {n for n in trace.graph.nodes if (n.op, n.target) == ("get_attr", name)}
    own = [n for n in lookups if n.args[1] in reads]
    return value_at(own[0].args, (0,)) if len(own) == 1 else None


def find_weight_only(anchor: Anchor, trace: RegionTrace) -> fx.Node | None:
    """The input or output of a Linear that this trace replaces by its weight, once."""
    if len(anchor.key) != int(anchor.kind == "in"):
        return None
    node = weight_only_linears(trace).get(anchor.module)
    if node is None:
        reads = {n for n in trace.graph.nodes if n.op == "get_attr" and n.target == f"{anchor.module}.weight"}
        users = {user for read in reads for user in read.users}
        node = users.pop() if len(users) == 1 else None
        if node is None or node.target is not nn.functional.linear or node.args[0] in reads or anchor.kind == "out":
            return None
    return value_at(node.args, (0,)) if anchor.kind == "in" else node
