"""Where a hidden state is, said so that it can be found again in another trace of the same code.

A value can have several anchors: the output of a Linear is also what its parent returns. An anchor names a module and a
boundary of it (an argument, a part of the result), or the n-th operation of one sort that the module's own code runs. All of
these stay the same when other children are inlined, and between training, evaluation and decoding.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from peftc.tracing.tracer import ModuleCall, Traced


@dataclass(frozen=True)
class Anchor:
    """`in`: argument `key` = (parameter, *path) of `module`; `out`: part `key` of its result; `node`: `key` = (operation, n)
    in the code of `module`; `argument`: `key` = (operation, n, name, *(operation, n) of others) one of q, k, v, kv of an
    attention call there, and of the others that take the same; `tokens`: what a stack takes as its tokens, `key` =
    (the embedding in it, whether its result has those of a prompt); `context`: what a stack attends to.
    """

    kind: Literal["in", "out", "node", "argument", "tokens", "context", "positions"]
    module: str
    key: tuple[Any, ...] = ()

    def each(self) -> Iterator[Anchor]:
        """The same for each attention call by itself."""
        yield Anchor(self.kind, self.module, self.key[:3])
        for operation, n in self.key[3:]:
            yield Anchor(self.kind, self.module, (operation, n, self.key[2]))

    def relative(self, region: str) -> Anchor:
        """This anchor, its module named from `region`."""
        called = str(self.key[0]).partition("call_module ")[2] if self.kind == "node" else ""
        outside = called.startswith(f"{region}.")  # of the code that calls it; else it is named from there
        key = (f"call_module {relative(called, region)}", *self.key[1:]) if outside else self.key
        return Anchor(self.kind, relative(self.module, region), key)


def relative(name: str, region: str) -> str:
    """`name` as seen from `region`, which contains it."""
    return name if not region else name[len(region) + 1 :]


def contains(region: str, name: str) -> bool:
    return not region or name == region or name.startswith(region + ".")


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], fx.Node]]:
    """The nodes in nested arguments or results, with the path to each."""
    if isinstance(value, fx.Node):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from parts(item, (*path, i))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, (*path, key))


def value_at(value: Any, path: tuple[Any, ...]) -> fx.Node | None:
    """The node at a path of nested arguments or results; the parts of an opaque result are taken out of it."""
    for key in path:
        if isinstance(value, fx.Node):
            value = taken_out(value, key)
            continue
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value if isinstance(value, fx.Node) else None


def taken_out(node: fx.Node, key: Any) -> fx.Node:
    """The one node that takes `key` out of what `node` returns."""
    found = [u for u in node.users if u.target is operator.getitem and u.args[1] == key]
    for other in found[1:]:
        other.replace_all_uses_with(found[0])
    if found:
        return found[0]
    with node.graph.inserting_after(node):
        return node.graph.call_function(operator.getitem, (node, key))


def calls_of(traced: Traced) -> list[ModuleCall]:
    """The calls of modules that are called just once, the region itself among them."""
    names = [c.name for c in traced.calls]
    once = [c for c in traced.calls if names.count(c.name) == 1]
    return [*once, own_call(traced)]


def own_call(traced: Traced) -> ModuleCall:
    """The region's own call, as seen from inside."""
    placeholders = {str(n.target).lstrip("*"): n for n in traced.graph.nodes if n.op == "placeholder"}
    output = next(n for n in traced.graph.nodes if n.op == "output")
    result = output.args[0] if traced.result is None else traced.result
    return ModuleCall("", "", placeholders, result, inlined=True)


def anchors(node: fx.Node, traced: Traced) -> list[Anchor]:
    """Every way to name a node's value."""
    found: list[Anchor] = []
    for call in calls_of(traced):
        found += [Anchor("in", call.name, path) for path, n in parts(call.arguments) if n is node]
        found += [Anchor("out", call.name, path) for path, n in parts(call.result) if n is node]
    many = node.op == "call_module" and len([c for c in traced.calls if c.name == node.target]) != 1
    if many or node.op not in ("placeholder", "call_module"):  # one call of several is told by its number
        frame, operation, n = node.meta["origin"]
        found.append(Anchor("node", frame, (operation, n)))
    return found


def find(anchor: Anchor, traced: Traced) -> fx.Node | None:
    """The node that an anchor names in this trace; None where this trace has no such value."""
    if anchor.kind in ("in", "out"):
        for call in calls_of(traced):
            if call.name == anchor.module:
                return value_at(call.arguments if anchor.kind == "in" else call.result, anchor.key)
        return at_matrix(anchor, traced)
    origin = (anchor.module, *anchor.key[:2])
    return next((n for n in traced.graph.nodes if n.meta.get("origin") == origin), None)


def at_matrix(anchor: Anchor, traced: Traced) -> fx.Node | None:
    """The boundary of a module that this trace does not call, where the code around computes with its weight as it would, once."""
    nodes = [n for n in traced.graph.nodes if n.op == "call_module" and n.target == anchor.module]
    if len(nodes) != 1 or len(anchor.key) != int(anchor.kind == "in"):
        return None
    return value_at(nodes[0].args, (0,)) if anchor.kind == "in" else nodes[0]


def frames_between(region: str, anchor: Anchor, traced: Traced) -> frozenset[str] | None:
    """The modules whose code must be entered, from `region` on, to reach an anchor; empty at the region's own boundary.

    None where the anchor is not inside `region`.
    """
    callers = {c.name: c.frame for c in traced.calls}
    if anchor.kind in ("in", "out") and anchor.module == region:
        return frozenset()
    frame = callers.get(anchor.module, "") if anchor.kind in ("in", "out") else anchor.module
    if not contains(region, anchor.module) or not contains(region, frame):
        return None
    found = {frame}
    while frame != region:
        if frame not in callers or not contains(region, callers[frame]):
            return None
        frame = callers[frame]
        found.add(frame)
    return frozenset(found)
