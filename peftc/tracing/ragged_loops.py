"""Loops of traced code over the pieces of a tensor, whose number only data tells: images packed one after the other.

    for q, k in zip(query.split(lengths.tolist()), key.split(lengths.tolist())): ...

Two turns are traced. The graph keeps the first, from the `piece` nodes, which stand for what a turn gets, to `ended`; the
second shows that turns do not depend on each other. Behind the loop, what they have made is the list of it: `gathered`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException

from peftc.tracing.context_managers import TraceError

if TYPE_CHECKING:
    from peftc.tracing.proxy import ConcreteProxy
    from peftc.tracing.tracer import RegionTracer


class Lengths(list[int]):
    """Numbers that only the data of a tensor tells; as an example two, that make up the first tensor which is split by them.

    `frame`: the module whose code asked for them.
    """

    frame = ""


class UnknownLength(TraceError):
    """Code asked how many such numbers there are; `frame`: the module whose code has asked for the numbers."""

    def __init__(self, frame: str) -> None:
        super().__init__("how many pieces there are is only known while the region runs")
        self.caller = frame


class Pieces(tuple[torch.Tensor, ...]):
    """The pieces of a tensor, as many as there are such numbers; as an example two."""


def segment(pieces: Sequence[Any]) -> Any:
    """What a turn gets of `pieces`; printed as a variable of a `for`."""
    return pieces[0]


def collect(value: Any) -> list[Any]:
    """What all turns have made; printed as a list to which each appends."""
    return [value]


def end_loop(first: Any) -> None:
    """Ends the loop that begins at `first`."""


def unknown(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The example of an operation that gives such numbers or takes them; None for any other operation.

    Raises: UnknownLength where how many there are is asked.
    """
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name == "tolist" and isinstance(args[0], torch.Tensor):
        return listed(args[0])
    given = [*args, *kwargs.values()]
    if not any(isinstance(value, Lengths | Pieces) for value in given) or target in (segment, collect):
        return None
    if name != "split" or not isinstance(lengths := given[1], Lengths):
        raise UnknownLength(next((value.frame for value in given if isinstance(value, Lengths)), ""))
    tensor: torch.Tensor = given[0]
    dim: int = kwargs.get("dim", given[2] if len(given) > 2 else 0)
    if not lengths:
        half = tensor.shape[dim] // 2
        lengths += [tensor.shape[dim] - half, half]
    return Pieces(torch.split(tensor, list(lengths), dim))


def listed(numbers: torch.Tensor) -> Any:
    try:
        return numbers.tolist()
    except DataDependentOutputException:
        if numbers.ndim != 1 or numbers.is_floating_point():
            raise
        return Lengths()


class Loops:
    """The loops of one trace. `open`: the nodes of each turn so far of the loop that is being traced."""

    def __init__(self, tracer: RegionTracer) -> None:
        self.tracer = tracer
        self.open: list[list[fx.Node]] = []
        self.inside = set[fx.Node]()  # of ended loops
        self.twins: dict[fx.Node, fx.Node] = {}  # what the second turn made, to what the first made
        self.before: list[set[int]] = []  # the constants that there were, as the tracer keeps them
        self.kept = (0, 0)  # calls and guards when the second turn began

    def turns(self, pieces: ConcreteProxy, example: type[ConcreteProxy]) -> Iterator[ConcreteProxy]:
        """What each of two turns gets. Several that are gone through side by side are one loop."""
        for turn in (0, 1):
            self.begin(turn)
            node = self.tracer.create_node("call_function", segment, (self.used(pieces.node),), {})
            node.meta["example"] = pieces._value[turn]  # pyright: ignore[reportPrivateUsage]
            yield example(node, self.tracer, node.meta["example"])
        if self.open:
            self.end()

    def begin(self, turn: int) -> None:
        if len(self.open) == turn:
            self.open.append([])
            if turn == 0:
                self.before = [set(known) for known in self.constants]
            self.forget()
            self.kept = len(self.tracer.calls), len(self.tracer.guards)
        elif len(self.open) != turn + 1 or any(node.target is not segment for node in self.open[-1]):
            raise TraceError("a loop over pieces stands within another one")

    def add(self, node: fx.Node) -> None:
        if self.open:
            self.open[-1].append(node)

    def end(self) -> None:
        first, second = self.open
        self.twins |= twins(first, second)
        for node in reversed(second):
            self.tracer.graph.erase_node(node)
        del self.tracer.calls[self.kept[0] :], self.tracer.guards[self.kept[1] :]
        self.forget()
        self.open = []
        self.inside.update(first)
        end = self.tracer.create_node("call_function", end_loop, (first[0],), {})
        end.meta["example"] = None
        self.tracer.in_place.end_loop(end)

    @property
    def constants(self) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
        return self.tracer.constants, self.tracer.made

    def forget(self) -> None:
        """Nodes for constants that were made in a turn are of that turn alone."""
        for known, before in zip(self.constants, self.before, strict=True):
            for key in known.keys() - before:
                del known[key]

    def used(self, node: fx.Node) -> fx.Node:
        if node in self.inside or node in self.twins:
            raise TraceError("what one turn of a loop over pieces has made is used behind the loop")
        return node

    def gathered(self, values: Sequence[Any], kind: type) -> fx.Node | None:
        """The list, or the tuple, of what all turns have made; None for any other values."""
        if (
            len(values) != 2
            or not all(isinstance(v, fx.Node) for v in values)
            or self.twins.get(values[1]) is not values[0]
        ):
            return None
        node = self.tracer.create_node("call_function", collect, (values[0],), {})
        node.meta["example"] = [value.meta["example"] for value in values]
        if kind is list:
            return node
        made = self.tracer.create_node("call_function", kind, (node,), {})
        made.meta["example"] = tuple(node.meta["example"])
        return made


def twins(first: list[fx.Node], second: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Which node of the second turn is which of the first.

    Raises: TraceError where turns differ: they count, or hand something on.
    """
    found: dict[fx.Node, fx.Node] = {}
    for one, other in zip(first, second, strict=False):
        args, kwargs = fx.map_arg((other.args, other.kwargs), lambda n: found.get(n, n))  # pyright: ignore
        if (one.op, one.target, one.args, one.kwargs) != (other.op, other.target, args, kwargs):
            break
        found[other] = one
    if len(found) < max(len(first), len(second)):
        raise TraceError("a turn of a loop over pieces depends on the turns before it")
    return found
