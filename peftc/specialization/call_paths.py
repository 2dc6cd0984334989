"""Specialises one call: traces every path through its branches, and inserts the edits into each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import fx

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.runtime import recheck_guard
from peftc.specialization import guards
from peftc.specialization.call_traces import ArgumentInspected, CallTraces, Raised
from peftc.specialization.code_printer import OtherPath
from peftc.specialization.expressions import Expressions
from peftc.specialization.names import GlobalNames
from peftc.specialization.passthrough_arguments import Call, fake_tensor_errors_unlogged
from peftc.tracing.operations import branch
from peftc.tracing.region_trace import RegionTrace

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
            help_ = "edit a smaller part of the layer, so that this code is not entered"
            raise PeftcError(Diagnostic("P406", message, help=help_))
        self.guard((traced, tracer))
        decisions = [cast(fx.Node, n.args[0]) for n in traced.graph.nodes if n.target is branch]
        self.rewrite(traced)
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
        conditions = guards.conditions(traced, tracer, passthrough, keywords, expressions)
        self.conditions.update(dict.fromkeys(conditions))
        self.traits = guards.traits(traced, passthrough) | self.traits
        for guard in guards.mutable_guards(traced):
            with traced.graph.inserting_after(guard.node):
                traced.graph.call_function(recheck_guard, (guard.node, guard.kind, guard.value))
