"""A rewritten region: one generated class for all modules of one structure with the same edits."""

from __future__ import annotations

import inspect
import linecache
import threading
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx, nn

from peftc.concurrency.checkpointing import preserve_choices
from peftc.concurrency.context import ALL, CHOICE, ChoiceVar
from peftc.concurrency.interrupts import Deferral, shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.instance_forward import FORWARD, GENERATED
from peftc.rewriting.boundary import boundary_graph
from peftc.rewriting.container import own_children, own_length
from peftc.rewriting.edits import RegionEdit
from peftc.rewriting.insert import Inserter
from peftc.runtime.guards import recheck_guard
from peftc.specialization import code_printer, guards
from peftc.specialization.call_traces import ArgumentInspected, Calls, Raised
from peftc.specialization.code_layout import all_of, decided
from peftc.specialization.derived_classes import followed, rebased
from peftc.specialization.guarded_tracer import GuardedTracer
from peftc.specialization.passthrough_arguments import quiet
from peftc.tracing.module_calls import bind_arguments
from peftc.tracing.operations import branch
from peftc.tracing.region_trace import RegionTrace
from peftc.tracing.tracer_base import is_tracing

MOST_WAYS = 32  # through the code of one call, before it is refused


@dataclass(frozen=True)
class Variant:
    """One specialisation of a forward: when it holds, its graph, and its code."""

    name: str
    conditions: tuple[str, ...]
    graph: fx.Graph
    source: str
    holds: Callable[..., bool]
    passthrough: frozenset[str]  # arguments that it hands on only


def uncompiled(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function outside whatever `torch.compile` makes: where a whole graph is asked for, that ends with the reason."""
    options: dict[str, Any] = {}
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        options["reason"] = f"peftc meets this {what} for the first time: make it once without torch.compile"
    return torch.compiler.disable(function, **options)


_preparing = ContextVar("preparing", default=False)


@shielded
def preparing() -> Generator[None]:
    """Inside the block, a call pattern that comes up is made ready for training as well as for evaluation, whichever the
    module is in. For copies only: their flags are touched.
    """
    token = _preparing.set(True)
    try:
        yield
    finally:
        _preparing.reset(token)


def base_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    return inspect.unwrap(cls.forward)


class GeneratedClass:
    """Owns the generated class of a region and the variants of its forward.

    A region that is only touched at its boundary has one forward for all calls. Another has a variant for each call
    pattern that its Python code can tell apart; an unseen one is traced when it first comes up. `absent`: the children and
    parameters that are None in all its modules. `entered`: the classes of the children whose code is entered.
    """

    def __init__(
        self,
        base: type[nn.Module],
        inline: frozenset[str],
        edits: tuple[RegionEdit, ...],
        name: str,
        absent: frozenset[str] = frozenset(),
        entered: tuple[type[nn.Module], ...] = (),
    ) -> None:
        self.base, self.inline, self.edits, self.name, self.absent = base, inline, edits, name, absent
        self.entered = entered
        self.signature = with_self(inspect.signature(base_forward(base)))
        self.names = code_printer.Names()
        self.variants: list[Variant] = []
        self.lock = threading.RLock()
        self.not_known = uncompiled(self.unseen, "call")
        self.not_made = uncompiled(self.make_without, "choice")
        self.dispatch: Callable[..., Any] = self.not_known
        self.cls = make_class(self)
        self.prepare()

    def __deepcopy__(self, memo: object) -> GeneratedClass:
        return self

    def __reduce__(self) -> Any:
        return (GeneratedClass, (self.base, self.inline, self.edits, self.name, self.absent, self.entered))

    # Choices -----------------------------------------------------------------------------------------------------

    def acting(self, module: nn.Module) -> Callable[..., Any]:
        """The forward of the edits that act in the present context."""
        off = cast(ChoiceVar, module.peftc_choice).off
        return self.without(off).dispatch if off else self.dispatch

    def without(self, off: str) -> GeneratedClass | Base:
        """The kind without the edits in `off`, the key of a choice."""
        other = getattr(self, f"without {off}", None)  # no dictionary: dynamo would guard on all of its keys
        return self.not_made(off) if other is None else other

    def make_without(self, off: str) -> GeneratedClass | Base:
        with self.lock:
            names = off.split(" ")
            left = () if off == ALL else tuple(edit for edit in self.edits if edit.edit not in names)
            own = (
                GeneratedClass(self.base, self.inline, left, self.name, self.absent, self.entered)
                if left
                else Base(self.base)
            )
            other = self if len(left) == len(self.edits) and off != ALL else own
            return vars(self).setdefault(f"without {off}", other)

    # Variants ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The forward of a region of which only arguments and result are touched: the model's own, in between."""
        if not self.inline and not self.variants:
            traced = boundary_graph(self.base, self.signature, self.edits)
            self.rewrite(traced)
            self.add(self.variant(traced.graph, {}, (), frozenset()))

    def unseen(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A call pattern that no variant holds for: traced, rewritten, added and run. Within a trace of another region only the
        shapes of the result count, which are those of the base: a variant is made when such a call really comes.
        """
        if is_tracing():
            return cast("Any", self.base).forward(module, *args, **kwargs)
        with self.lock:
            variant = self.known(module, *args, **kwargs)  # another thread may have been first
            variant = variant or self.learn(module, args, kwargs)
            if _preparing.get():
                module.train(not module.training)
                if self.known(module, *args, **kwargs) is None:
                    self.learn(module, args, kwargs, variant.passthrough)
                module.train(not module.training)
            forward = self.functions[variant.name]
        return forward(module, *args, **kwargs)

    def known(self, module: nn.Module, *args: Any, **kwargs: Any) -> Variant | None:
        return next((v for v in self.variants if v.holds(module, *args, **kwargs)), None)

    def learn(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], likely: frozenset[str] | None = None
    ) -> Variant:
        """Makes the variant for a call, which it does not run. `likely`: which arguments are only handed on."""
        arguments = bind_arguments(self.base.forward, module, args, kwargs)
        variant = self.specialised(Calls(self.base, self.inline, self.signature, module, arguments, likely))
        if not variant.holds(module, *args, **kwargs):
            raise PeftcError(
                Diagnostic(
                    "P901",
                    f"the forward made for a call of {self.name} does not recognise that call",
                    notes=tuple(variant.conditions),
                    help="this is a bug in peftc: report the model, the spec and the call",
                )
            )
        return self.add(variant)

    def add(self, variant: Variant) -> Variant:
        with Deferral():
            self.variants.append(variant)
            self.link()
        return variant

    def specialised(self, calls: Calls) -> Variant:
        """The rewritten forward of one call pattern, with both ways at every branch on what is only known inside."""
        while True:
            try:
                graph, others, conditions = self.ways(calls)
                break
            except ArgumentInspected:  # on another path than the first
                pass
        return self.variant(graph, others, conditions, calls.handed)

    def ways(self, calls: Calls) -> tuple[fx.Graph, Mapping[int, code_printer.Others | Exception], tuple[str, ...]]:
        """The first way, the others at its branches, and when they hold. A way ends where the model's own code raises, or where
        there is nothing to edit.
        """
        conditions: dict[str, None] = {}
        found = 0

        def way(script: tuple[bool, ...]) -> code_printer.Others:
            nonlocal found
            found += 1
            traced, tracer = calls.along(script)
            if found > MOST_WAYS:
                raise PeftcError(too_many_ways(self.name))
            conditions.update(dict.fromkeys(self.conditions(traced, tracer, calls)))
            decisions = [cast(fx.Node, n.args[0]) for n in traced.graph.nodes if n.target is branch]
            self.rewrite(traced)
            at = range(len(script), len(traced.outcomes))
            return traced.graph, {i: other((*traced.outcomes[:i], not traced.outcomes[i]), decisions[i]) for i in at}

        def other(script: tuple[bool, ...], decision: fx.Node) -> code_printer.Others | Exception:
            try:
                with quiet():
                    return way(script)
            except Raised as ended:
                calls.ask_beforehand(decision)
                conditions.update(dict.fromkeys(self.conditions(*ended.call, calls)))
                return ended.error
            except PeftcError as error:
                if error.diagnostics[0].code != "P403":  # a call that goes where there is nothing to edit is told
                    raise
                calls.ask_beforehand(decision)
                return error

        try:
            graph, others = way(())
        except Raised as ended:
            raise ended.error from None
        return graph, others, tuple(conditions)

    def variant(
        self,
        graph: fx.Graph,
        others: Mapping[int, code_printer.Others | Exception],
        conditions: tuple[str, ...],
        handed: frozenset[str],
    ) -> Variant:
        name = f"variant_{len(self.variants) + 1}"
        body = code_printer.Emitter(graph, self.names, self.signature, others).body()
        source = code_printer.function(name, self.signature, body)
        return Variant(name, conditions, graph, source, self.predicate(name, conditions), handed)

    def conditions(self, traced: RegionTrace, tracer: GuardedTracer, calls: Calls) -> list[str]:
        """When a graph is the right one; what may change while it runs is asked again where the model asks."""
        found = guards.conditions(
            traced, tracer, calls.handed, calls.keys, code_printer.Emitter(traced.graph, self.names, self.signature)
        )
        for guard in guards.late(traced):
            with traced.graph.inserting_after(guard.node):
                traced.graph.call_function(recheck_guard, (guard.node, guard.kind, guard.value))
        return found

    def rewrite(self, traced: RegionTrace) -> None:
        inserter = Inserter(traced, self.base)
        inserter.lookup.prepare(self.edits)
        for edit in self.edits:
            inserter.insert(edit)

    # Code --------------------------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """The generated functions as readable Python."""
        parts = [v.source for v in self.variants]
        if self.inline:
            parts = [*filter(None, ["\n".join(self.names.constant_lines())]), *parts, self.dispatch_source()]
        return "\n\n\n".join(parts)

    def predicate(self, name: str, conditions: tuple[str, ...]) -> Callable[..., bool]:
        """Whether a variant is the one for a call."""
        source = code_printer.function("holds", self.signature, all_of("return ", conditions))
        namespace = dict(self.names.values)
        exec(compile(source, f"<peftc {self.name} {name}>", "exec"), namespace)
        return namespace["holds"]

    def dispatch_source(self) -> str:
        passed = code_printer.passed_on(self.signature)
        lines = decided([(v.conditions, f"return {v.name}({passed})") for v in self.variants])
        return code_printer.function("dispatch", self.signature, [*lines, f"return unseen({passed})"])

    def link(self) -> None:
        """Compiles the generated source and lets the class run it."""
        filename = f"<peftc {self.name} {id(self):x}>"
        source = self.source
        namespace = dict(self.names.values) | {"unseen": self.not_known}
        exec(compile(source, filename, "exec"), namespace)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        self.functions = namespace
        self.dispatch = namespace["dispatch"] if self.inline else namespace["variant_1"]


class Base:
    """Stands for a kind whose edits are all switched off: the forward is that of the region's own class."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.dispatch: Callable[..., Any] = cls.forward


def too_many_ways(name: str) -> Diagnostic:
    return Diagnostic(
        "P406",
        f"the code of {name} has more than {MOST_WAYS} ways, which depend on values that are only known while it runs",
        help="edit a smaller part of the layer, so that this code is not entered",
    )


def with_self(signature: inspect.Signature) -> inspect.Signature:
    """The signature with its first parameter under the name that generated code uses."""
    first, *others = signature.parameters.values()
    named = first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[first.replace(name="self"), *others]) if named else signature


def make_class(kind: GeneratedClass) -> type[nn.Module]:
    """A subclass of the region's own class under the same names, so that everything that asks for the class still works."""
    preserve_choices()
    # Arguments are given as they came: decorators of a base's forward tell positional ones and keywords apart.
    lines = ["def forward(self, *args, **kwargs):"]
    lines += [
        "    if getattr(type(self), '_peftc_kind', None) is not kind:"
    ]  # a bound method of it may outlive the edits
    lines += [
        "        return type(self).forward(self, *args, **kwargs)",
        "    return kind.acting(self)(self, *args, **kwargs)",
    ]
    source = "\n".join(lines)
    namespace: dict[str, Any] = {"kind": kind}
    exec(compile(source, f"<peftc {kind.name}>", "exec"), namespace)
    forward = namespace["forward"]
    forward.__signature__ = kind.signature
    setattr(forward, GENERATED, True)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        kind.base.__setattr__(self, name, followed(self, value) if name == FORWARD else value)

    members: dict[str, Any] = {
        "forward": forward,
        "__setattr__": __setattr__,
        "__module__": kind.base.__module__,
        "__qualname__": kind.base.__qualname__,
        "__doc__": kind.base.__doc__,
        "__reduce_ex__": reduce,
        "_replicate_for_data_parallel": replicate,
        CHOICE: ChoiceVar(),
        "_peftc_kind": kind,
    }
    if issubclass(kind.base, nn.Sequential):
        members |= {"__iter__": own_children, "__len__": own_length}
    made: Any = type(kind.base.__name__, (kind.base,), members)
    return made


def replicate(self: Any) -> Any:
    """A replica for `nn.DataParallel`, whose thread does not have the context of this one."""
    replica = super(type(self)._peftc_kind.cls, self)._replicate_for_data_parallel()
    vars(replica)[CHOICE] = cast(ChoiceVar, self.peftc_choice).fixed()
    return replica


def reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles a module of a generated class by its kind, and by the class that others have derived from it."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    cls = type(self)
    kind: GeneratedClass = cls._peftc_kind
    return (blank, (kind,) if cls is kind.cls else (kind, cls), state)


def blank(kind: GeneratedClass, derived: Any = None) -> nn.Module:
    cls = kind.cls if derived is None else rebased(derived, derived._peftc_kind.cls, kind.cls)
    return cls.__new__(cls)
