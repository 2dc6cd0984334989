"""Arguments that a region's code passes through without inspecting them.

A trace in which an argument is a proxy is compared with the trace in which it is itself. If the two
graphs agree, the code has not inspected the argument. So with tensors that may be None.

A forward with `**kwargs` is traced with no keywords and with all that transformers knows. If the
traces differ only in that some calls got all of them, these are printed with `**kwargs`, and one
variant serves every choice of keywords.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import fx

from peftc.dataflow.nodes import ancestors
from peftc.fakes.data_answers import fake_tensor_errors_unlogged
from peftc.runtime import PASSTHROUGH
from peftc.specialization.expressions import FORWARDED
from peftc.specialization.guarded_tracer import GuardedTracer, is_argument, name_of
from peftc.tracing.operations import attention
from peftc.tracing.region_trace import RegionTrace

Call: TypeAlias = "tuple[RegionTrace, GuardedTracer]"
Trace: TypeAlias = Callable[[frozenset[str], Mapping[str, Any]], Call]
"""Traces one call: with these arguments symbolic, and these replaced (or with these keywords)."""


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


def passthrough_arguments(
    trace: Trace, plain: Call, values: Mapping[str, Any], tested: frozenset[str], likely: frozenset[str] | None
) -> frozenset[str]:
    """Those of the constants in `values`, and of the tensors, that the code passes through.

    `plain`: their trace; `tested`: those known to be inspected; `likely`: a guess, tried first.
    """

    def uninspected(names: frozenset[str]) -> bool:
        call = attempt(trace, names)
        return call is not None and not inspected(call) and agree(plain, call, {n: values[n] for n in names})

    # Tensors that are arguments of modules and attentions and of nothing else.
    nodes = [n for n in plain[0].graph.nodes if is_argument(n) and isinstance(n.meta["example"], torch.Tensor)]
    untyped = [n for n in nodes if n not in plain[1].typed]
    passed = [n for n in untyped if all(u.op == "call_module" or u.target is attention for u in n.users)]
    tensors = frozenset(map(name_of, passed))
    if likely is not None and likely <= {*values, *tensors} and uninspected(likely - tensors):
        return without_identity_tests(trace, plain, likely - tensors, values, likely & tensors)
    names = candidates = frozenset(values) - tested
    while names:
        call = attempt(trace, names)
        recorded = inspected(call) if call else frozenset[str]()
        if not recorded:
            break
        names -= recorded
    if not uninspected(names):
        names = frozenset(n for n in candidates if uninspected(frozenset({n})))
        names = names if uninspected(names) else frozenset()
    return without_identity_tests(trace, plain, names, values, tensors - tested)


def without_identity_tests(
    trace: Trace, plain: Call, names: frozenset[str], values: Mapping[str, Any], tensors: frozenset[str]
) -> frozenset[str]:
    """`names` and `tensors` without those tested by identity (`x is True`, `x is None`)."""
    # No proxy notices such a test, so the other truth value, or None, is traced in its place.
    truths = {n: not values[n] for n in names if isinstance(values[n], bool)}
    nones = dict.fromkeys([*tensors, *(n for n in names if values[n] is not None)])
    call = attempt(trace, names) or plain

    def same(changed: Mapping[str, Any]) -> bool:
        other = attempt(trace, names.difference(changed), changed) if changed else call
        return other is not None and agree(other, call, changed)

    if same(nones | truths) and same(dict.fromkeys(truths)):
        return names | tensors
    tested = {n for others in (nones, truths) for n, v in others.items() if not same({n: v})}
    return (names | tensors) - tested


def attempt(trace: Trace, names: frozenset[str], changed: Mapping[str, Any] | None = None) -> Call | None:
    try:
        with fake_tensor_errors_unlogged():
            return trace(names, changed or {})
    except Exception:  # whatever code raises on a proxy for None, or on None for a tensor
        return None


def compared_with_none(function: Callable[..., Any]) -> frozenset[str]:
    """The variables that a function's own instructions compare with None."""
    names: set[str] = set()
    before: list[dis.Instruction] = []
    for instruction in dis.get_instructions(function):
        if instruction.opname.endswith(("IF_NONE", "IF_NOT_NONE")) and before:
            names.add(str(before[-1].argval))
        elif instruction.opname == "IS_OP" and len(before) > 1 and before[-1].argval is None:
            names.add(str(before[-2].argval))
        before = [*before[-1:], instruction]
    return frozenset(names)


def forwarded_kwargs(
    trace: Trace, signature: inspect.Signature, passthrough: frozenset[str], actual: Iterable[str]
) -> tuple[Call, frozenset[str]] | None:
    """The trace without keywords, and those it forwards; None if it inspects `actual` ones."""
    parameter = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    named = frozenset(n for n in passthrough if not n.startswith("**"))
    if parameter is None or not passthrough.issuperset(f"**{k}" for k in actual):
        return None
    base = attempt(trace, named, {})
    keywords = frozenset([*PASSTHROUGH, *actual]).difference(signature.parameters)
    while base is not None and keywords:
        probe = attempt(trace, named | {f"**{k}" for k in keywords}, dict.fromkeys(keywords))
        if probe is None:
            return None
        comparison = KeywordComparison(probe, keywords)
        rejected = frozenset(n[2:] for n in inspected(probe))
        if not rejected and comparison.traces(base[0], probe[0]):
            for node in comparison.forwarding:
                node.meta[FORWARDED] = parameter
            bound = PASSTHROUGH.intersection(signature.parameters)  # never among the keywords
            return (base, keywords | bound) if keywords.issuperset(actual) else None
        rejected |= comparison.missing
        keywords = keywords - rejected if rejected & keywords else frozenset()
    return None


class KeywordComparison(TraceComparison):
    """Compares a trace without keywords with one whose calls receive all of `keywords`."""

    def __init__(self, probe: Call, keywords: frozenset[str]) -> None:
        self.names = keywords
        nodes = [n for n in probe[0].graph.nodes if is_argument(n) and name_of(n)[:2] == "**"]
        super().__init__({n: object() for n in nodes if name_of(n)[2:] in keywords})
        self.forwarding: list[fx.Node] = []
        self.missing = frozenset[str]()  # keywords that some call did not receive with the others

    def keywords(self, a: fx.Node, b: fx.Node) -> bool:
        extra = frozenset(k for k, v in b.kwargs.items() if v in self.constants and k not in a.kwargs)
        if extra and extra != self.names:
            self.missing |= self.names - extra
            return False
        if extra:
            self.forwarding.append(a)
        return self.values(a.kwargs, {k: v for k, v in b.kwargs.items() if k not in extra})
