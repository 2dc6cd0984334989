"""Which arguments of a call a region's code only hands on, so that one forward serves all their values.

Python cannot be watched deciding on None or True. But a trace in which such an argument is a proxy can be compared with
the trace in which it is itself: `is None`, `isinstance`, truth, comparison and arithmetic all come out differently, or are
recorded. Where the two graphs agree, with the argument in the place of its value, the code has not looked at it. The same
holds of a tensor that could have been None.
"""

from __future__ import annotations

import dis
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from peftc.concurrency.interrupts import shielded
from peftc.dataflow.nodes import ancestors
from peftc.specialization.guarded_tracer import GuardedTracer, is_argument, name_of
from peftc.tracing.operations import attention
from peftc.tracing.region_trace import RegionTrace

Call: TypeAlias = "tuple[RegionTrace, GuardedTracer]"
Trace: TypeAlias = Callable[[frozenset[str], Mapping[str, Any]], Call]
"""Traces one call: with these arguments symbolic, and these replaced."""


def passthrough_arguments(
    trace: Trace, plain: Call, values: Mapping[str, Any], compared: frozenset[str], likely: frozenset[str] | None
) -> frozenset[str]:
    """Those of the plain arguments in `values`, and of the tensors, that the code hands on without looking at them.

    `plain` is the trace in which all of `values` are constants. Args: `compared`: arguments that need not be tried;
    `likely`: the answer for a call that is much like this one.
    """

    def agree(names: frozenset[str]) -> bool:
        call = tried(trace, names)
        return call is not None and not asked(call) and same(plain, call, {n: values[n] for n in names})

    tensors = _passed(plain)
    if likely is not None and likely <= {*values, *tensors} and agree(likely - tensors):
        return unlooked(trace, plain, likely - tensors, values, likely & tensors)
    names = frozenset(values) - compared
    found = _unasked(trace, names)
    if not agree(found):
        found = frozenset(n for n in names if agree(frozenset({n})))
        found = found if agree(found) else frozenset()
    return unlooked(trace, plain, found, values, tensors - compared)


def unlooked(
    trace: Trace, plain: Call, names: frozenset[str], values: Mapping[str, Any], tensors: frozenset[str]
) -> frozenset[str]:
    """`names` and `tensors` without what is decided on by identity (`x is True`, `x is None`), which no proxy notices: those
    instead of which the other truth, or None, would not be handed on in the same way.
    """
    truths = {n: not values[n] for n in names if isinstance(values[n], bool)}
    nones = dict.fromkeys([*tensors, *(n for n in names if values[n] is not None)])
    call = tried(trace, names) or plain

    def agree(changed: Mapping[str, Any]) -> bool:
        other = tried(trace, names.difference(changed), changed) if changed else call
        return other is not None and same(other, call, changed)

    if agree(nones | truths) and agree(dict.fromkeys(truths)):
        return names | tensors
    told = {n for others in (nones, truths) for n, v in others.items() if not agree({n: v})}
    return (names | tensors) - told


def _passed(plain: Call) -> frozenset[str]:
    """The tensors that are arguments of modules and attentions and of nothing else."""
    traced, tracer = plain
    nodes = [n for n in traced.graph.nodes if is_argument(n) and isinstance(n.meta["example"], torch.Tensor)]
    return frozenset(
        name_of(n)
        for n in nodes
        if n not in tracer.typed and all(u.op == "call_module" or u.target is attention for u in n.users)
    )


def _unasked(trace: Trace, names: frozenset[str]) -> frozenset[str]:
    """`names` without those about which a question was heard."""
    while names:
        call = tried(trace, names)
        heard = asked(call) if call else frozenset[str]()
        if not heard:
            break
        names -= heard
    return names


def tried(trace: Trace, names: frozenset[str], changed: Mapping[str, Any] | None = None) -> Call | None:
    try:
        with quiet():
            return trace(names, changed or {})
    except Exception:  # whatever code raises that is given a proxy for None, or None for a tensor
        return None


@shielded
def quiet() -> Generator[None]:
    """Inside the block, torch does not tell of every operation on tensors without data that fails."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def compared_with_none(function: Callable[..., Any]) -> frozenset[str]:
    """The variables that a function's own code tests for being None, as far as its instructions show."""
    found: set[str] = set()
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(function):
        if instruction.opname.endswith(("IF_NONE", "IF_NOT_NONE")) and before:
            found.add(str(before[-1].argval))
        elif instruction.opname == "IS_OP" and len(before) > 1 and before[-1].argval is None:
            found.add(str(before[-2].argval))
        before = [*before[-1:], instruction]
    return frozenset(found)


def asked(call: Call) -> frozenset[str]:
    """The symbolic arguments about which something was asked."""
    traced, tracer = call
    decided = {root for guard in traced.guards for root in ancestors(guard.node)}
    nodes = [n for n in traced.graph.nodes if is_argument(n) and name_of(n) in tracer.symbolic]
    return frozenset(name_of(n) for n in nodes if n in decided or n in tracer.typed)


def same(first: Call, second: Call, values: Mapping[str, Any]) -> bool:
    """Whether two traces did the same, the arguments in `values`, constants in `first`, being left open in `second`."""
    a, b = first[0], second[0]
    own = {n: values[name_of(n)] for n in b.graph.nodes if is_argument(n) and name_of(n) in values}
    return alike(a, b, Same(own))


def alike(a: RegionTrace, b: RegionTrace, found: Same) -> bool:
    """Whether two traces agree, node by node and guard by guard."""
    if a.attribute_guards != b.attribute_guards or a.outcomes != b.outcomes or len(a.guards) != len(b.guards):
        return False
    own = found.constants
    nodes, others = list(a.graph.nodes), [n for n in b.graph.nodes if n.op == "placeholder" or n not in own]
    if len(nodes) != len(others) or not all(map(found.nodes, nodes, others)):
        return False
    guards = zip(a.guards, b.guards, strict=True)
    return all(found.argument(x.node, y.node) and (x.kind, x.value) == (y.kind, y.value) for x, y in guards)


class Same:
    """Compares the nodes of two graphs, one by one; `constants` are nodes of the second that stand for these values."""

    def __init__(self, constants: Mapping[fx.Node, Any]) -> None:
        self.constants = constants
        self.twins: dict[fx.Node, fx.Node] = {}

    def nodes(self, a: fx.Node, b: fx.Node) -> bool:
        self.twins[b] = a
        return (
            a.op == b.op
            and (a.target is b.target or a.target == b.target)
            and self.argument(a.args, b.args)
            and self.keywords(a, b)
        )

    def keywords(self, a: fx.Node, b: fx.Node) -> bool:
        return self.argument(a.kwargs, b.kwargs)

    def argument(self, a: Any, b: Any) -> bool:
        if isinstance(b, fx.Node):
            if not isinstance(a, fx.Node):
                return b in self.constants and _equal(a, self.constants[b])
            return self.twins.get(b) is a
        if isinstance(b, tuple | list) and isinstance(a, tuple | list):
            return len(a) == len(b) and all(map(self.argument, a, b))
        if isinstance(b, dict) and isinstance(a, dict):
            return list(a) == list(b) and all(self.argument(a[k], b[k]) for k in a)
        if isinstance(b, slice) and isinstance(a, slice):
            return self.argument((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))
