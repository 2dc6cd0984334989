"""Compares two traces of one call: with an argument as a proxy, and as a constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import fx

from peftc.dataflow.nodes import ancestors
from peftc.specialization.guarded_tracer import GuardedTracer, is_argument, name_of
from peftc.tracing.region_trace import RegionTrace

Call: TypeAlias = "tuple[RegionTrace, GuardedTracer]"


class TraceComparison:
    """Compares two graphs. `constants`: values in the first for nodes of the second."""

    def __init__(self, constants: Mapping[fx.Node, Any]) -> None:
        self.constants = constants
        self.counterparts: dict[fx.Node, fx.Node] = {}

    def traces(self, a: RegionTrace, b: RegionTrace) -> bool:
        """Whether two traces agree in nodes, guards, facts and branches."""
        if a.attribute_guards != b.attribute_guards or a.outcomes != b.outcomes or len(a.guards) != len(b.guards):
            return False
        nodes = list(a.graph.nodes)
        others = [n for n in b.graph.nodes if n.op == "placeholder" or n not in self.constants]
        if len(nodes) != len(others) or not all(map(self.nodes, nodes, others)):
            return False
        guards = zip(a.guards, b.guards, strict=True)
        return all(self.values(x.node, y.node) and (x.kind, x.value) == (y.kind, y.value) for x, y in guards)

    def nodes(self, a: fx.Node, b: fx.Node) -> bool:
        self.counterparts[b] = a
        same = a.op == b.op and (a.target is b.target or a.target == b.target)
        return same and self.values(a.args, b.args) and self.keywords(a, b)

    def keywords(self, a: fx.Node, b: fx.Node) -> bool:
        return self.values(a.kwargs, b.kwargs)

    def values(self, a: Any, b: Any) -> bool:
        if isinstance(b, fx.Node):
            if not isinstance(a, fx.Node):
                return b in self.constants and _equal(a, self.constants[b])
            return self.counterparts.get(b) is a
        if isinstance(b, tuple | list) and isinstance(a, tuple | list):
            return len(a) == len(b) and all(map(self.values, a, b))
        if isinstance(b, dict) and isinstance(a, dict):
            return list(a) == list(b) and all(self.values(a[k], b[k]) for k in a)
        if isinstance(b, slice) and isinstance(a, slice):
            return self.values((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


def agree(constant: Call, symbolic: Call, values: Mapping[str, Any]) -> bool:
    """Whether two traces agree. `values`: constants of the first that are proxies in the second."""
    nodes = [n for n in symbolic[0].graph.nodes if is_argument(n) and name_of(n) in values]
    return TraceComparison({n: values[name_of(n)] for n in nodes}).traces(constant[0], symbolic[0])


def inspected(call: Call) -> frozenset[str]:
    """The symbolic arguments that a guard or a type test depends on."""
    traced, tracer = call
    decided = {root for guard in traced.guards for root in ancestors(guard.node)}
    nodes = [n for n in traced.graph.nodes if is_argument(n) and name_of(n) in tracer.symbolic]
    return frozenset(name_of(n) for n in nodes if n in decided or n in tracer.typed)
