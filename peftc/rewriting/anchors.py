"""Where a hidden state is, said so that it can be found again in another trace of the same code.

A value can have several anchors: the output of a Linear is also what its parent returns. An anchor names a module and a
boundary of it (an argument, a part of the result), or an operation that the module's own code runs, by where it stands there. All of
these stay the same when other children are inlined, and between training, evaluation and decoding. Where an optional argument puts
another operation in between, they come apart.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx, nn

from peftc.tracing.code_positions import Occurrence, Origin
from peftc.tracing.region_trace import ModuleCall, RegionTrace


@dataclass(frozen=True)
class Ordinal:
    """One of the operations of one sort that a module's code runs: that at `index` of `turns`, which are all of them."""

    index: int
    turns: tuple[Occurrence, ...]

    @property
    def place(self) -> str:
        """Where in the code it is."""
        return self.turns[self.index][0]

    def among(self, turns: list[Occurrence]) -> int | None:
        """Which it is in another trace, whose operations of that sort are these: the one at the same place of the code.

        Where nothing runs at that place, or not as often, it is the one at the same index: if there are as many, and those of them
        that both traces have are at one index in both.
        """
        own = self.turns[self.index]
        if own in turns and self.often(own, self.turns) == self.often(own, turns):
            return turns.index(own)
        if len(turns) != len(self.turns):
            return None
        alike = all(mine == turn for mine, turn in zip(self.turns, turns, strict=True) if turn in self.turns)
        return self.index if alike else None

    @staticmethod
    def often(own: Occurrence, turns: list[Occurrence] | tuple[Occurrence, ...]) -> int:
        return sum(place == own[0] for place, _ in turns)

    def __str__(self) -> str:
        return f"{self.index + 1} of {len(self.turns)}, at {self.place}"


@dataclass(frozen=True)
class Anchor:
    """`in`: argument `key` = (parameter, *path) of `module`; `out`: part `key` of its result; `node`: `key` = (operation, ordinal)
    in the code of `module`; `operand`: what such an operation takes, `key` = (operation, ordinal, position); `argument`: `key` =
    (operation, ordinal, name, *(operation, ordinal) of others) one of q, k, v, kv of an attention call there, and of the others
    that take the same; `tokens`: what a stack takes as its tokens, `key` = (the embedding in it, whether its result has those of
    a prompt); `context`: what a stack attends to.
    """

    kind: Literal["in", "out", "node", "operand", "argument", "tokens", "context", "positions"]
    module: str
    key: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(map(str, self.key))} of `{self.module or 'the region'}`"

    def each(self) -> Iterator[Anchor]:
        """The same for each attention call by itself."""
        yield Anchor(self.kind, self.module, self.key[:3])
        for operation, n in self.key[3:]:
            yield Anchor(self.kind, self.module, (operation, n, self.key[2]))

    def relative(self, region: str) -> Anchor:
        """This anchor, its module named from `region`."""
        called = str(self.key[0]).partition("call_module ")[2] if self.kind in ("node", "operand") else ""
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


def calls_of(traced: RegionTrace) -> list[ModuleCall]:
    """The calls of modules that are called just once, the region itself among them."""
    often = Counter(c.name for c in traced.calls)
    return [*(c for c in traced.calls if often[c.name] == 1), own_call(traced)]


def own_call(traced: RegionTrace) -> ModuleCall:
    """The region's own call, as seen from inside."""
    placeholders = {str(n.target).lstrip("*"): n for n in traced.graph.nodes if n.op == "placeholder"}
    output = next(n for n in traced.graph.nodes if n.op == "output")
    result = output.args[0] if traced.result is None else traced.result
    return ModuleCall("", "", placeholders, result, inlined=True)


def anchors(node: fx.Node, traced: RegionTrace) -> list[Anchor]:
    """Every way to name a node's value."""
    found: list[Anchor] = []
    for call in calls_of(traced):
        found += [Anchor("in", call.name, path) for path, n in parts(call.arguments) if n is node]
        found += [Anchor("out", call.name, path) for path, n in parts(call.result) if n is node]
    for name, computed in uncalled(traced).items():
        found += [Anchor("in", name, ("input",))] if computed.args[0] is node else []
        found += [Anchor("out", name)] if computed is node else []
    many = node.op == "call_module" and len([c for c in traced.calls if c.name == node.target]) != 1
    if many or node.op not in ("placeholder", "call_module"):  # one call of several is told by its number
        found.append(Anchor("node", node.meta["origin"][0], ordinal(node, traced)))
    return found


def ordinal(node: fx.Node, traced: RegionTrace) -> tuple[str, Ordinal]:
    """The sort of an operation, and which of its module's code it is."""
    frame, operation, turn = origin(node)
    turns = tuple(origin(n)[2] for n in alike(frame, operation, traced))
    return operation, Ordinal(turns.index(turn), turns)


def operand(node: fx.Node, user: fx.Node, traced: RegionTrace) -> Anchor:
    """A node's value as what an operation takes."""
    return Anchor("operand", origin(user)[0], (*ordinal(user, traced), user.args.index(node)))


def origin(node: fx.Node) -> Origin:
    return node.meta["origin"]


def alike(frame: str, operation: str, traced: RegionTrace) -> list[fx.Node]:
    """The operations of one sort that the code of one module runs."""
    return [n for n in traced.graph.nodes if n.meta.get("origin", ())[:2] == (frame, operation)]


def uncalled(traced: RegionTrace) -> dict[str, fx.Node]:
    """The Linears that a trace does not call, where the code around computes with the weight as they would; each once."""
    called = {c.name for c in traced.calls}
    nodes = [n for n in traced.graph.nodes if n.op == "call_module" and n.target not in called and "origin" in n.meta]
    often = Counter(n.target for n in nodes)
    return {str(n.target): n for n in nodes if often[n.target] == 1}


def callers_of(traced: RegionTrace) -> dict[str, tuple[str, str]]:
    """The module whose code calls each module, and where."""
    read = {name: (origin(n)[0], origin(n)[2][0]) for name, n in uncalled(traced).items()}
    return read | {c.name: (c.caller, c.position) for c in traced.calls}


def find(anchor: Anchor, traced: RegionTrace) -> fx.Node | None:
    """The node that an anchor names in this trace; None where this trace has no such value."""
    if anchor.kind in ("in", "out"):
        for call in calls_of(traced):
            if call.name == anchor.module:
                return value_at(call.arguments if anchor.kind == "in" else call.result, anchor.key)
        return at_matrix(anchor, traced)
    nodes, which = alike(anchor.module, anchor.key[0], traced), anchor.key[1]
    if isinstance(which, int):  # of a model that an earlier version has pickled
        return next((n for n in nodes if n.meta["number"] == which), None)
    index = which.among([origin(n)[2] for n in nodes])
    node = None if index is None else nodes[index]
    return value_at(node.args, anchor.key[2:3]) if node is not None and anchor.kind == "operand" else node


def at_matrix(anchor: Anchor, traced: RegionTrace) -> fx.Node | None:
    """The boundary of a module that this trace does not call, where the code around computes with its weight as it would, once."""
    if len(anchor.key) != int(anchor.kind == "in"):
        return None
    node = uncalled(traced).get(anchor.module)
    if node is None:
        reads = {n for n in traced.graph.nodes if n.op == "get_attr" and n.target == f"{anchor.module}.weight"}
        users = {user for read in reads for user in read.users}
        node = users.pop() if len(users) == 1 else None
        if node is None or node.target is not nn.functional.linear or node.args[0] in reads or anchor.kind == "out":
            return None
    return value_at(node.args, (0,)) if anchor.kind == "in" else node


def frames_between(region: str, anchor: Anchor, traced: RegionTrace) -> frozenset[str] | None:
    """The modules whose code must be entered, from `region` on, to reach an anchor; empty at the region's own boundary.

    None where the anchor is not inside `region`.
    """
    callers = {name: frame for name, (frame, _) in callers_of(traced).items()}
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
