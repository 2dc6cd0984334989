"""A rewritten region: one generated class for all modules of one structure with the same edits."""

from __future__ import annotations

import inspect
import linecache
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from peftc.concurrency.context import ALL, CHOICE, NO_CHOICE, NO_EDITS, ChoiceVar, preserve_choices
from peftc.concurrency.interrupts import Deferral, shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.modules.form_hooks import has_hooks
from peftc.modules.instance_forward import FORWARD, GENERATED, replace_base, with_generated_forward
from peftc.modules.subclasses import constructor, subclass
from peftc.observation.reachable_code import NO_READS, CodeReads, reachable_code
from peftc.rewriting.boundary import boundary_graph
from peftc.rewriting.edits import CONTAINER, RegionEdit
from peftc.rewriting.insert import Inserter
from peftc.rewriting.linear_products import distribute_products, join_low_rank_terms
from peftc.rewriting.passes.run import insert_edits
from peftc.sharding.layouts import note_split
from peftc.sharding.parallel_styles import PARALLELIZED, parallel_members
from peftc.specialization.call_paths import CallPaths, CallTraces
from peftc.specialization.code_printer import OtherPath, function_body
from peftc.specialization.expressions import call_arguments, conjunction, function, is_wrapped, write_dispatch
from peftc.specialization.names import FIXED_NAMES, GlobalNames
from peftc.specialization.region_forward import forward_of
from peftc.specialization.tensor_reads import READ, compile_reads, read, renamed_code, unpack_weights
from peftc.specialization.variants import Variant, captions
from peftc.specialization.visible_children import child_members
from peftc.tracing.module_calls import bind_arguments
from peftc.tracing.patches import patching_lock
from peftc.tracing.region_trace import RegionTrace
from peftc.tracing.tracer_base import is_tracing


def uncompiled(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A function that graphs of `torch.compile` leave out; `fullgraph=True` shows the reason."""
    reason = f"peftc meets this {what} for the first time: make it once without torch.compile"
    return cast(Any, torch.compiler.disable)(function, reason=reason)


NUMBERED = ("variant_", "PASSTHROUGH")  # begin the names of other functions and constants of generated code
CALLING_FORMS, WITHOUT = "calling forms", "without "  # begin the names of attributes that have other classes
_PLACE = re.compile(rf"\b{CONTAINER}\.\w+\.\w+(?=\.)")  # of the forms of an edit (`RegionEdit.place`)
ClassKey = tuple[Any, ...]
_both_modes = ContextVar("both_modes", default=False)


@shielded
def specializing_both_modes() -> Generator[None]:
    """Inside, a new call pattern gets variants for training and evaluation. For copies only."""
    token = _both_modes.set(True)
    try:
        yield
    finally:
        _both_modes.reset(token)


class GeneratedClass:
    """Owns the generated class of a region and the variants of its forward.

    A region that is only edited at its boundary has one forward. Another has a variant for each
    call pattern that its Python code can tell apart, traced when it first comes up.

    Args:
        members: `distinctive_members` of all its modules.
        entered: classes whose code is entered.
        calls_forms: whether its code calls all forms, for hooks.
        like: one with the same edits at sites of other names, without `inline`.
    """

    def __init__(
        self,
        base: type[nn.Module],
        inline: frozenset[str],
        edits: tuple[RegionEdit, ...],
        name: str,
        members: frozenset[str] = frozenset(),
        entered: tuple[type[nn.Module], ...] = (),
        calls_forms: bool = False,
        like: GeneratedClass | None = None,
    ) -> None:
        self.base, self.inline, self.edits, self.name, self.members = base, inline, edits, name, members
        self.entered, self.calls_forms = entered, calls_forms
        self.entered_names = tuple(sorted(inline - {""}))
        # The code that its variants are traced from, and what that reads.
        self.code = tuple(map(reachable_code, (base, *entered))) if like is None else like.code
        self.reads = CodeReads.of(base, *entered) if inline else NO_READS
        self.signature = signature_of(base) if like is None else like.signature
        hiding = [n for n in [*self.signature.parameters][1:] if n in FIXED_NAMES or n.startswith(NUMBERED)]
        if inline and hiding:
            message = f"the forward of {name} has a parameter `{hiding[0]}`, which hides what generated code needs"
            raise PeftcError(Diagnostic("P407", message, help="rename the parameter, or edit a part of the layer"))
        self.names = GlobalNames(self.signature.parameters) if like is None else like.names
        self.variants: list[Variant] = []
        self.lock = threading.RLock()
        self._respecialize = uncompiled(self.respecialize, "call")
        self._make_without = uncompiled(self.make_without, "choice")
        self._make_calling_forms = uncompiled(self.make_calling_forms, "hook")
        self.dispatch: Callable[..., Any] = self._respecialize
        self.cls = make_class(self)
        if not inline:  # only arguments and result are edited: the model's own forward, in between
            renamed = None if like is None else self.renamed_variant(like)
            self.add(renamed or self.variant(self.boundary_graph()), None if renamed is None else like)

    def boundary_graph(self) -> fx.Graph:
        traced = boundary_graph(self.base, self.signature, self.edits)
        self.rewrite(traced)
        return traced.graph

    def renamed_variant(self, like: GeneratedClass) -> Variant | None:
        """The variant of another class, with the names of the sites of this one; None where the
        layout of its lines depends on the lengths of the names.
        """
        before = like.variants[0].source
        places = {old.place: new.place for old, new in zip(like.edits, self.edits, strict=True)}
        source = _PLACE.sub(lambda match: places.get(match[0], match[0]), before)
        if any(len(old) != len(new) for old, new in places.items()) and (is_wrapped(before) or is_wrapped(source)):
            return None
        return replace(like.variants[0], make_graph=self.boundary_graph, source=source)

    def __deepcopy__(self, memo: object) -> GeneratedClass:
        return self

    def __reduce__(self) -> Any:
        return (GeneratedClass, (self.base, self.inline, self.edits, self.name, self.members, self.entered))

    # Choices --------------------------------------------------------------------------------------

    def without(self, off: str) -> GeneratedClass | Unedited:
        """The class without the edits in `off`, the key of a choice."""
        other = getattr(self, without_name(off), None)  # no dictionary: dynamo would guard on all of its keys
        return self._make_without(off) if other is None else other

    def make_without(self, off: str) -> GeneratedClass | Unedited:
        with self.lock:
            names = off.split(" ")
            edits = () if off == ALL else tuple(edit for edit in self.edits if edit.edit not in names)
            arguments = (self.base, self.inline, edits, self.name, self.members, self.entered)
            other = GeneratedClass(*arguments) if edits else Unedited(self.base)
            other = self if len(edits) == len(self.edits) and off != ALL else other
            return vars(self).setdefault(without_name(off), other)

    def for_hooks_of(self, module: nn.Module) -> GeneratedClass:
        """The class whose code calls the forms of a module if hooks want to see these calls."""
        if self.calls_forms or not has_hooks(getattr(module, CONTAINER, None)):
            return self
        other = getattr(self, CALLING_FORMS, None)
        return self._make_calling_forms() if other is None else other

    def make_calling_forms(self) -> GeneratedClass:
        with self.lock:
            arguments = (self.base, self.inline, self.edits, self.name, self.members, self.entered)
            return vars(self).setdefault(CALLING_FORMS, GeneratedClass(*arguments, calls_forms=True))

    # Variants -------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Where code has been patched, or reads something else, forgets the variants: the next call
        is traced.
        """
        if self.reads.are_current() or is_tracing():
            return
        with self.lock, patching_lock, Deferral():  # a trace in another thread may have patched torch
            reads, last = CodeReads.of(self.base, *self.entered), self.reads
            self.reads = reads
            if reads.are_equal(last):
                return
            self.code = tuple(map(reachable_code, (self.base, *self.entered)))
            self.signature = signature_of(self.base)
            self.names = GlobalNames(self.signature.parameters)
            self.variants, self.dispatch = [], self._respecialize
            for name in [n for n in vars(self) if n == CALLING_FORMS or n.startswith(WITHOUT)]:
                delattr(self, name)

    def respecialize(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs a call that no variant holds for: traces it, inserts the edits, adds the variant."""
        if is_tracing():  # of another region: only shapes count, which are those of the base
            return cast("Any", self.base).forward(module, *args, **kwargs)
        with self.lock:
            self.renew()
            variant = self.variant_for(module, *args, **kwargs)  # another thread may have been first
            variant = variant or self.specialize(module, args, kwargs)
            if _both_modes.get():
                module.train(not module.training)
                if self.variant_for(module, *args, **kwargs) is None:
                    self.specialize(module, args, kwargs, variant.passthrough)
                module.train(not module.training)
            forward = self.functions[variant.name]
        return forward(module, *args, **kwargs)

    def variant_for(self, module: nn.Module, *args: Any, **kwargs: Any) -> Variant | None:
        return next((v for v in self.variants if v.holds(module, *args, **kwargs)), None)

    def specialize(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], likely: frozenset[str] | None = None
    ) -> Variant:
        """Adds the variant of a call. `likely`: its probable passthrough arguments."""
        arguments = bind_arguments(self.base.forward, module, args, kwargs)
        traces = CallTraces(self.base, self.inline, self.signature, module, arguments, likely)
        paths = CallPaths(self.name, traces, self.names, self.rewrite)
        with _disable_current_modes():  # a program that is exported would have the operations of the trace
            paths.follow()
        self.reads = CodeReads.of(self.base, *self.entered)  # the model's own code may have set some of them
        variant = self.variant(paths.graph, paths.others, tuple(paths.conditions), traces.passthrough, paths.traits)
        if not variant.holds(module, *args, **kwargs):
            message = f"the forward made for a call of {self.name} does not recognise that call"
            help_ = "this is a bug in peftc: report the model, the spec and the call"
            raise PeftcError(Diagnostic("P901", message, notes=variant.conditions, help=help_))
        return self.add(variant)

    def variant(
        self,
        graph: fx.Graph,
        others: Mapping[int, OtherPath | Exception] | None = None,
        conditions: tuple[str, ...] = (),
        passthrough: frozenset[str] = frozenset(),
        traits: Mapping[str, str] | None = None,
    ) -> Variant:
        name = f"variant_{len(self.variants) + 1}"
        source = function(name, self.signature, function_body(graph, self.names, self.signature, others))
        predicate = function("holds", self.signature, conjunction("return ", conditions))
        values = dict(self.names.values)
        return Variant(name, conditions, lambda: graph, source, (predicate, values), passthrough, traits or {})

    def renamed_code(self, like: GeneratedClass, filename: str) -> CodeType | None:
        """The compiled code of another class, with the names of the sites of this one; None if a
        name is of another length, or what it names is not a site alone.
        """
        names = {old.slug: new.slug for old, new in zip(like.edits, self.edits, strict=True)}
        elsewhere = _PLACE.sub("", like.source)
        if any(len(old) != len(new) or old in elsewhere for old, new in names.items()) or len(names) > 1:
            return None
        return renamed_code(like.linked, names, filename)

    def add(self, variant: Variant, like: GeneratedClass | None = None) -> Variant:
        """`like`: a class whose code is that of this one but for the names of sites."""
        with Deferral():
            self.variants.append(variant)
            self.link(like)
        return variant

    def rewrite(self, traced: RegionTrace) -> None:
        inserter = Inserter(traced, self.base, self.calls_forms)
        inserter.lookup.resolve(self.edits)
        insert_edits(inserter, self.edits)
        distribute_products(traced.graph, inserter.numbers)
        join_low_rank_terms(traced.graph, inserter.numbers)
        unpack_weights(traced.graph)

    @property
    def source(self) -> str:
        """The generated functions as readable Python."""
        labels = captions(self.variants) if self.inline else ["every call"]
        parts = [f"# {label}\n{v.source}" for label, v in zip(labels, self.variants, strict=True)]
        if self.inline:
            passed = call_arguments(self.signature)
            lines = write_dispatch([(v.conditions, f"return {v.name}({passed})") for v in self.variants])
            parts.append(function("dispatch", self.signature, [*lines, f"return respecialize({passed})"]))
        return "\n\n\n".join(parts)

    def link(self, like: GeneratedClass | None = None) -> None:
        """Compiles the generated source and lets the class run it. `like`: as in `add`."""
        filename = f"<peftc {self.name} {id(self):x}>"
        source = self.source
        namespace = dict(self.names.values) | {"respecialize": self._respecialize, READ: read}
        code = None if like is None else self.renamed_code(like, filename)
        self.linked = code or compile_reads(source, filename, self.names.reads)
        exec(self.linked, namespace)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        self.functions = namespace
        self.dispatch = namespace["dispatch"] if self.inline else namespace["variant_1"]


def signature_of(cls: type[nn.Module]) -> inspect.Signature:
    """That of a forward, whose first parameter is named `self`."""
    signature = inspect.signature(inspect.unwrap(cls.forward))
    first, *others = signature.parameters.values()
    if "self" in signature.parameters or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return signature
    return signature.replace(parameters=[first.replace(name="self"), *others])


def without_name(off: str) -> str:
    """The attribute that has the class without some edits; dynamo takes no dots in its name."""
    return f"{WITHOUT}{off.replace('.', '/')}"


@dataclass(frozen=True)
class Unedited:
    """Stands for a class whose edits are all disabled: `dispatch` is the region's own forward."""

    base: type[nn.Module]
    entered_names: tuple[str, ...] = ()

    @property
    def dispatch(self) -> Callable[..., Any]:
        return self.base.forward

    def for_hooks_of(self, module: nn.Module) -> Unedited:
        return self


def make_class(kind: GeneratedClass) -> type[nn.Module]:
    """A subclass of the region's own class under the same names."""
    preserve_choices()
    forward = forward_of(kind)
    forward.__signature__ = kind.signature
    setattr(forward, GENERATED, True)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        kind.base.__setattr__(self, name, with_generated_forward(self, value) if name == FORWARD else value)
        if name == PARALLELIZED:
            note_split(self)

    members: dict[str, Any] = {
        "forward": forward,
        "__init__": constructor(kind.base),
        "__setattr__": __setattr__,
        "__reduce_ex__": reduce,
        "_replicate_for_data_parallel": replicate,
        # Of modules that others construct, of classes that they derive from this one.
        CHOICE: ChoiceVar(NO_EDITS if kind.edits else NO_CHOICE),
        "_peftc_kind": kind,
        **child_members(kind.base),
        **parallel_members(kind.base),
    }
    return subclass(kind.base, members)


def replicate(self: Any) -> Any:
    """A replica for `nn.DataParallel`, whose thread does not have the context of this one."""
    replica = super(type(self)._peftc_kind.cls, self)._replicate_for_data_parallel()
    vars(replica)[CHOICE] = cast(ChoiceVar, self.peftc_choice).fixed()
    return replica


def reduce(self: Any, protocol: Any) -> Any:
    """Copies and pickles a module by its `GeneratedClass`, and a derived class."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    cls = type(self)
    kind: GeneratedClass = cls._peftc_kind
    return (blank, (kind,) if cls is kind.cls else (kind, cls), state)


def blank(kind: GeneratedClass, derived: Any = None) -> nn.Module:
    cls = kind.cls if derived is None else replace_base(derived, derived._peftc_kind.cls, kind.cls)
    return cls.__new__(cls)


def class_key(*parts: Any) -> ClassKey:
    """Equal for two regions exactly if they can share a generated class. The edits are last."""
    *others, edits = parts
    return (*others, *(edit.fingerprint for edit in edits))


def names_pattern(edits: Iterable[RegionEdit]) -> Iterator[object]:
    """Equal for the edits of two regions if they differ in the names of sites alone."""
    numbers: dict[str, int] = {}
    for edit in edits:
        yield edit.pattern, numbers.setdefault(edit.place, len(numbers))
