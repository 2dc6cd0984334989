"""Loops over the segments of a packed tensor (images in a row). Their number is data-dependent.

    for q, k in zip(query.split(lengths.tolist()), key.split(lengths.tolist())): ...

Two iterations are traced. If they agree, iterations are independent, and the second is erased. The
graph keeps the first: it begins with its loop variables, `segment` nodes, and ends with `end_loop`.
`collect` is the list of a value that every iteration computes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException

from peftc.tracing.in_place import MutationTracker
from peftc.tracing.operations import collect, end_loop, segment
from peftc.tracing.region_trace import TraceError, UnknownLength
from peftc.tracing.tensor_provenance import TensorProvenance


class RaggedSizes(list[int]):
    """Data-dependent sizes, read by `caller`. The first split by them fills in two halves."""

    caller = ""


class Segments(tuple[torch.Tensor, ...]):
    """The segments of a tensor split by `RaggedSizes`. As an example, there are two."""


def ragged_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: str) -> Any:
    """The result of `tolist` or of a split by ragged sizes, else None. Raises: UnknownLength."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name == "tolist" and isinstance(args[0], torch.Tensor):
        return _sizes(args[0], caller)
    operands = [*args, *kwargs.values()]
    if target in (segment, collect) or not any(isinstance(operand, RaggedSizes | Segments) for operand in operands):
        return None
    sizes = operands[1] if name == "split" else None
    if not isinstance(sizes, RaggedSizes):
        raise UnknownLength(next((o.caller for o in operands if isinstance(o, RaggedSizes)), ""))
    tensor: torch.Tensor = operands[0]
    dim: int = kwargs.get("dim", operands[2] if len(operands) > 2 else 0)
    if not sizes:
        half = tensor.shape[dim] // 2
        sizes += [tensor.shape[dim] - half, half]
    return Segments(torch.split(tensor, list(sizes), dim))


def _sizes(tensor: torch.Tensor, caller: str) -> Any:
    try:
        return tensor.tolist()
    except DataDependentOutputException:
        if tensor.ndim != 1 or tensor.is_floating_point():
            raise
        sizes = RaggedSizes()
        sizes.caller = caller
        return sizes


class Loops:
    """The loops of one trace. `logs`: its lists, from which entries of second iterations go."""

    def __init__(
        self, tracer: fx.Tracer, provenance: TensorProvenance, mutations: MutationTracker, logs: Sequence[list[Any]]
    ) -> None:
        self.tracer, self.mutations, self.logs = tracer, mutations, logs
        self.constants: tuple[dict[int, fx.Node], ...] = (provenance.nodes, provenance.call_nodes)
        self.iterations: list[list[fx.Node]] = []  # of the open loop: the nodes of each iteration
        self.closed = set[fx.Node]()  # nodes in loops that have ended
        self.counterparts: dict[fx.Node, fx.Node] = {}  # node of a second iteration: that of the first
        self.outer_constants: list[set[int]] = []  # keys of `constants` when the loop began
        self.log_lengths: list[int] = []  # of `logs`, when the second iteration began

    def iterate(self, segments: fx.Node, examples: Segments) -> Iterator[fx.Node]:
        """The loop variable in two iterations. Tensors in one `zip` share a loop."""
        for index in (0, 1):
            self.begin(index)
            node = self.tracer.create_node("call_function", segment, (self.in_scope(segments),), {})
            node.meta["example"] = examples[index]
            yield node
        if self.iterations:
            self.end()

    def begin(self, index: int) -> None:
        if len(self.iterations) == index:
            self.iterations.append([])
            self.mutations.loop_body = self.iterations[-1]
            if index == 0:
                self.outer_constants = [set(nodes) for nodes in self.constants]
            self.forget_constants()
            self.log_lengths = list(map(len, self.logs))
        elif len(self.iterations) != index + 1 or any(node.target is not segment for node in self.iterations[-1]):
            raise TraceError("a loop over segments is nested in another one")

    def add(self, node: fx.Node) -> None:
        if self.iterations:
            self.iterations[-1].append(node)

    def end(self) -> None:
        first, second = self.iterations
        matches: dict[fx.Node, fx.Node] = {}
        for one, other in zip(first, second, strict=False):
            args, kwargs = fx.map_arg((other.args, other.kwargs), lambda n: matches.get(n, n))  # pyright: ignore
            if (one.op, one.target, one.args, one.kwargs) != (other.op, other.target, args, kwargs):
                break
            matches[other] = one
        if len(matches) < max(len(first), len(second)):
            raise TraceError("an iteration of a loop over segments depends on those before it")
        self.counterparts |= matches
        for node in reversed(second):
            self.tracer.graph.erase_node(node)
        for log, length in zip(self.logs, self.log_lengths, strict=True):
            del log[length:]
        self.forget_constants()
        self.iterations = []
        self.closed.update(first)
        end = self.tracer.create_node("call_function", end_loop, (first[0],), {})
        end.meta["example"] = None
        self.mutations.end_loop(end)

    def forget_constants(self) -> None:
        """Drops nodes created for constants in an iteration: outside of it they are not valid."""
        for nodes, outer in zip(self.constants, self.outer_constants, strict=True):
            for key in nodes.keys() - outer:
                del nodes[key]

    def in_scope(self, node: fx.Node) -> fx.Node:
        """Returns `node`. Raises: TraceError if it was computed in a loop that has ended."""
        if node in self.closed or node in self.counterparts:
            raise TraceError("a value computed in one iteration of a loop over segments is used after the loop")
        return node

    def collected(self, values: Sequence[Any], container: Callable[..., Any]) -> fx.Node | None:
        """The node of a list or tuple of one value per iteration; None for any other `values`."""
        if len(values) != 2 or not all(isinstance(value, fx.Node) for value in values):
            return None
        if self.counterparts.get(values[1]) is not values[0]:
            return None
        node = self.tracer.create_node("call_function", collect, (values[0],), {})
        node.meta["example"] = [value.meta["example"] for value in values]
        if container is list:
            return node
        converted = self.tracer.create_node("call_function", container, (node,), {})
        converted.meta["example"] = tuple(node.meta["example"])
        return converted
