"""Specialises one call: traces every path through its branches, and inserts the edits into each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.data_answers import fake_tensor_errors_unlogged
from peftc.fakes.tensors import fake_copy, new_mode
from peftc.models.names import error_summary
from peftc.modules.instance_forward import replace_base
from peftc.modules.offload import casts_weights
from peftc.rewriting.edits import CONTAINER
from peftc.runtime import recheck_guard
from peftc.runtime.guards import SMALLER
from peftc.specialization import guards
from peftc.specialization.code_printer import OtherPath
from peftc.specialization.expressions import Expressions
from peftc.specialization.guarded_tracer import GuardedTracer, constant_arguments
from peftc.specialization.leaf_functions import LeafFunction, frames_of, innermost_function
from peftc.specialization.names import GlobalNames
from peftc.specialization.passthrough_arguments import (
    Call,
    agree,
    compared_with_none,
    forwarded_kwargs,
    passthrough_arguments,
    without_identity_tests,
)
from peftc.tracing.bytecode import Origin, compares_identity
from peftc.tracing.operations import branch
from peftc.tracing.region_trace import NoneAccess, RegionTrace, TraceError

CASTING = "leave the edited module out of the casting, by `skip_modules_pattern`"


class ArgumentInspected(Exception):
    """One path inspects an argument that the others pass through: all paths are traced again."""


class Raised(Exception):
    """The model's own code raised `error`; `call` is the trace up to there."""

    def __init__(self, error: Exception, call: Call) -> None:
        super().__init__(str(error))
        self.error, self.call = error, call


class CallTraces:
    """Traces one call any number of times, on copies without data."""

    def __init__(
        self,
        base: type[nn.Module],
        inline: frozenset[str],
        signature: inspect.Signature,
        module: nn.Module,
        arguments: Mapping[str, Any],
        likely: frozenset[str] | None = None,
    ) -> None:
        self.base, self.inline, self.signature = base, inline, signature
        self.module, self.arguments, self.likely = module, arguments, likely
        self.var_keyword = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        self.given_keywords: Mapping[str, Any] = arguments.get(self.var_keyword, {})
        self.constants = constant_arguments(signature, arguments)
        self.passthrough = frozenset[str]()  # known, as `keywords`, once the first path has been traced
        self.keywords: frozenset[str] | None = None  # that `**` may have, where it is forwarded as a whole
        self.all_constant = False
        self.cache: dict[object, Call] = {}
        self.size_guards = set[Origin]()  # decisions on sizes inside, one outcome of which this call cannot have
        self.leaf_functions: dict[LeafFunction, PeftcError] = {}  # with what refused their code
        self.nones = set[Origin]()  # parts of results that the code must see as None where they are None
        entered = [type(m) for n, m in module.named_modules() if n and n in inline]
        self.identity_tests = any(compares_identity(inspect.unwrap(cls.forward), cls) for cls in {base, *entered})

    def along(self, script: tuple[bool, ...]) -> Call:
        """The trace along one path, in which passthrough arguments are symbolic.

        Raises: ArgumentInspected where this path inspects them, or raises: they become constants.
        """
        try:
            plain = self.cached(script)
        except Raised:
            if script and not self.all_constant and (self.passthrough or self.keywords is not None):
                self._restart_with_constants()
            raise
        if self.all_constant:
            return plain
        if not script and not self.identity_tests:
            tested = compared_with_none(inspect.unwrap(self.base.forward))
            trace = partial(self.cached, script)
            self.passthrough = passthrough_arguments(trace, plain, self.constants, tested, self.likely)
        forwarded = self._forwarded(script)
        if not script:
            self.keywords = forwarded[1] if forwarded else None
        elif not self._same_passthrough(script, plain, forwarded):
            self._restart_with_constants()
        return forwarded[0] if forwarded else self.cached(script, self.passthrough)

    def guard_sizes(self, decision: fx.Node) -> None:
        """Makes a decision on sizes inside a guard on the arguments. Raises: ArgumentInspected."""
        if decision.meta["origin"] not in self.size_guards:
            self.size_guards.add(decision.meta["origin"])
            self.cache.clear()
            raise ArgumentInspected

    def keep_whole(self, function: LeafFunction | None, refusal: PeftcError) -> None:
        """Makes a function with refused code a leaf. Raises: ArgumentInspected if it is new."""
        if function is not None and function not in self.leaf_functions:
            self.leaf_functions[function] = refusal
            self.cache.clear()
            raise ArgumentInspected

    def _restart_with_constants(self) -> NoReturn:
        self.passthrough, self.keywords, self.all_constant = frozenset(), None, True
        self.cache.clear()  # edits have been inserted into the graphs
        raise ArgumentInspected

    def _forwarded(self, script: tuple[bool, ...]) -> tuple[Call, frozenset[str]] | None:
        """The trace for any forwarded keywords; None where the code may inspect them."""
        if self.identity_tests:
            return None

        def trace(symbolic: frozenset[str], keywords: Mapping[str, Any]) -> Call:
            if not keywords and not self.given_keywords:
                return self.cached(script, symbolic)
            return self.trace(script, symbolic, {**self.arguments, self.var_keyword: keywords})

        return forwarded_kwargs(trace, self.signature, self.passthrough, self.given_keywords)

    def _same_passthrough(
        self, script: tuple[bool, ...], plain: Call, forwarded: tuple[Call, frozenset[str]] | None
    ) -> bool:
        """Whether a path passes through what the first one does."""
        constants = {n: v for n, v in self.constants.items() if n in self.passthrough}
        tensors = self.passthrough.difference(constants)
        names = frozenset(constants)
        return (
            (forwarded[1] if forwarded else None) == self.keywords
            and agree(plain, self.cached(script, self.passthrough), constants)
            and without_identity_tests(partial(self.cached, script), plain, names, self.constants, tensors)
            == self.passthrough
        )

    def cached(
        self, script: tuple[bool, ...], symbolic: frozenset[str] = frozenset(), changed: Mapping[str, Any] | None = None
    ) -> Call:
        """A trace with some arguments symbolic, and others replaced (`**key` for a keyword)."""
        changed = changed or {}
        key = (script, symbolic & set(self.constants), tuple(changed.items()))
        if key not in self.cache:
            arguments = {**self.arguments, **{n: v for n, v in changed.items() if not n.startswith("**")}}
            keywords = {n[2:]: v for n, v in changed.items() if n.startswith("**")}
            if keywords:
                arguments[self.var_keyword] = {**self.given_keywords, **keywords}
            self.cache[key] = self.trace(script, symbolic, arguments)
        return self.cache[key]

    def trace(self, script: tuple[bool, ...], symbolic: frozenset[str], arguments: Mapping[str, Any]) -> Call:
        """The trace along one path. Raises: P407 for code that cannot be traced; Raised."""
        if casts_weights(self.module):
            message = f"a call of {self.base.__name__} cannot be traced: diffusers casts weights in it for each call"
            note = "the trace is of a copy that has the dtype in which they are stored"
            raise PeftcError(Diagnostic("P407", message, notes=(note,), help=CASTING))
        mode = new_mode()
        copy = fake_copy(self.module, mode)
        generated: Any = getattr(type(copy), "_peftc_kind", None)
        copy.__class__ = self.base if generated is None else replace_base(type(copy), generated.cls, self.base)
        vars(copy)["_modules"].pop(CONTAINER, None)
        tracer = GuardedTracer(lambda name: name in self.inline, script, symbolic)
        tracer.optional_results |= self.nones
        tracer.size_guards |= self.size_guards
        tracer.leaf_functions |= self.leaf_functions.keys()
        try:
            fakes = fake_copy(dict(arguments), mode)
        except Exception as error:  # whatever copying an object or a kind of tensor (nested, …) raises
            message = f"a call of {self.base.__name__} has an argument that cannot be copied without its data"
            raise PeftcError(Diagnostic("P407", message, notes=(error_summary(error),))) from error
        try:
            with mode:
                return tracer.trace_region(copy, fakes), tracer
        except NoneAccess as error:
            if error.origin in self.nones:
                raise
            self.nones.add(error.origin)
            return self.trace(script, symbolic, arguments)
        except (TraceError, DataDependentOutputException) as error:
            message = f"a call of {self.base.__name__} cannot be traced: {error}"
            notes = (f"in the code of {tracer.call_stack[-1]}",) if tracer.call_stack else ()
            refusal = PeftcError(Diagnostic("P407", message, notes=notes, help=SMALLER))
            self.keep_whole(innermost_function(frames_of(error)), refusal)
            raise refusal from error
        except PeftcError:
            raise
        except Exception as error:
            raise Raised(error, (tracer.snapshot(), tracer)) from error


MAX_PATHS = 32  # through the code of one call, before it is refused


@dataclass
class CallPaths:
    """The first path of a call, the other paths at its branches, and the conditions of them all."""

    name: str
    traces: CallTraces
    names: GlobalNames
    rewrite: Callable[[RegionTrace], None]
    graph: fx.Graph = field(init=False)
    others: Mapping[int, OtherPath | Exception] = field(init=False)
    conditions: dict[str, None] = field(default_factory=dict[str, None])
    traits: dict[str, str] = field(default_factory=dict[str, str])
    count: int = 0

    def follow(self) -> None:
        """Raises: P406 for more than 32 paths; errors of traces and of the model's code."""
        while True:
            self.conditions, self.traits, self.count = {}, {}, 0
            try:
                self.graph, self.others = self.path(())
                return
            except ArgumentInspected:
                continue
            except Raised as raised:
                raise raised.error from None

    def path(self, script: tuple[bool, ...]) -> OtherPath:
        self.count += 1
        traced, tracer = self.traces.along(script)
        if self.count > MAX_PATHS:
            message = f"the code of {self.name} has more than {MAX_PATHS} paths that depend on run-time values"
            raise PeftcError(Diagnostic("P406", message, help=SMALLER))
        self.guard((traced, tracer))
        decisions = [cast(fx.Node, n.args[0]) for n in traced.graph.nodes if n.target is branch]
        try:
            self.rewrite(traced)
        except PeftcError as error:
            for refusal in self.traces.leaf_functions.values() if error.diagnostics[0].code == "P403" else ():
                raise refusal from error  # the state may be one of the function's code
            raise
        outcomes = traced.outcomes
        branches = range(len(script), len(outcomes))
        return traced.graph, {i: self.other((*outcomes[:i], not outcomes[i]), decisions[i]) for i in branches}

    def other(self, script: tuple[bool, ...], decision: fx.Node) -> OtherPath | Exception:
        """A path from a branch on, or the error that ends it (P403: nothing to edit there)."""
        try:
            with fake_tensor_errors_unlogged():
                return self.path(script)
        except Raised as raised:
            self.traces.guard_sizes(decision)
            self.guard(raised.call)
            return raised.error
        except PeftcError as error:
            if error.diagnostics[0].code != "P403":
                raise
            self.traces.guard_sizes(decision)
            return error

    def guard(self, call: Call) -> None:
        """Adds the conditions of a path, and rechecks of guards that may fail while it runs."""
        traced, tracer = call
        passthrough, keywords = self.traces.passthrough, self.traces.keywords
        expressions = Expressions(self.names, self.traces.signature)
        try:
            conditions = guards.conditions(call, passthrough, keywords, expressions)
        except guards.RunTimeDecision as decision:
            self.traces.keep_whole(tracer.deciding_functions.get(decision.node), decision)
            raise
        self.conditions.update(dict.fromkeys(conditions))
        self.traits = guards.traits(traced, passthrough) | self.traits
        for guard in guards.mutable_guards(traced):
            with traced.graph.inserting_after(guard.node):
                traced.graph.call_function(recheck_guard, (guard.node, guard.kind, guard.value))
