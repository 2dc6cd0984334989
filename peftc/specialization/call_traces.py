"""The traces of one call of a region."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

from torch import fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.tensors import fake_copy, new_mode
from peftc.models.configs import error_summary
from peftc.rewriting.container import CONTAINER
from peftc.specialization.derived_classes import exchanged
from peftc.specialization.forwarded_kwargs import open_rest
from peftc.specialization.guarded_tracer import GuardedTracer, plain_arguments
from peftc.specialization.passthrough_arguments import Call, compared_with_none, passthrough_arguments, same, unlooked
from peftc.tracing.bytecode import compares_identity
from peftc.tracing.code_positions import Origin
from peftc.tracing.errors import NoneAccess, TraceError


class ArgumentInspected(Exception):
    """One path through the code looked at what others do not: they are to be traced again."""


class Raised(Exception):
    """The model's own code raised `error`; `call` is what it did before."""

    def __init__(self, error: Exception, call: Call) -> None:
        super().__init__(str(error))
        self.error, self.call = error, call


class Calls:
    """Traces one call as often as asked, on copies without data, so that nothing happens to the model, its caches or the
    random state.
    """

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
        self.rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
        self.values = plain_arguments(signature, arguments)
        self.handed = frozenset[str]()  # known once the first path has been traced
        self.keys: frozenset[str] | None = None  # the keywords that the rest may have, where it is handed on as a whole
        self.looked_at = False
        self.made: dict[object, Call] = {}
        self.beforehand = set[Origin]()  # decisions on sizes, one way of which this call cannot go
        self.nones = set[Origin]()  # parts of results that the code must get as None where they are None

    def along(self, script: tuple[bool, ...]) -> Call:
        """The trace along one path, in which arguments that are only handed on are left open.

        Raises: LookedAt where another path hands on what this one looks at, or raises; from then on nothing is left open.
        """
        try:
            plain = self.remembered(script)
        except Raised:
            if script and not self.looked_at and (self.handed or self.keys is not None):
                self.close()
            raise
        if self.looked_at:
            return plain
        if not script:
            compared = compared_with_none(inspect.unwrap(self.base.forward))
            trace = partial(self.remembered, script)
            if not self.by_identity():
                self.handed = passthrough_arguments(trace, plain, self.values, compared, self.likely)
        opened = self.opened(script)
        if not script:
            self.keys = opened[1] if opened else None
        elif not self.agrees(script, plain, opened):
            self.close()
        return opened[0] if opened else self.remembered(script, self.handed)

    def close(self) -> NoReturn:
        self.handed, self.keys, self.looked_at = frozenset(), None, True
        self.made.clear()  # what has been returned has been rewritten
        raise ArgumentInspected

    def ask_beforehand(self, decision: fx.Node) -> None:
        """Raises LookedAt, once for each decision: where it is one on sizes, traces have it as a guard from then on."""
        if decision.meta["origin"] not in self.beforehand:
            self.beforehand.add(decision.meta["origin"])
            self.made.clear()
            raise ArgumentInspected

    def by_identity(self) -> bool:
        """Whether code that is entered may tell truths apart where nobody notices."""
        entered = (m for n, m in self.module.named_modules() if n and n in self.inline)
        return any(compares_identity(inspect.unwrap(cls.forward), cls) for cls in {self.base, *map(type, entered)})

    def opened(self, script: tuple[bool, ...]) -> tuple[Call, frozenset[str]] | None:
        """The trace for whatever keywords are handed on; None where the code may tell them apart."""
        if self.by_identity():
            return None
        return open_rest(partial(self.with_keywords, script), self.signature, self.handed, self.rests())

    def agrees(self, script: tuple[bool, ...], plain: Call, opened: tuple[Call, frozenset[str]] | None) -> bool:
        """Whether a path hands on what the first one did."""
        constants = {n: v for n, v in self.values.items() if n in self.handed}
        trace = partial(self.remembered, script)
        tensors = self.handed.difference(constants)
        return (
            (opened[1] if opened else None) == self.keys
            and same(plain, self.remembered(script, self.handed), constants)
            and unlooked(trace, plain, frozenset(constants), self.values, tensors) == self.handed
        )

    def with_keywords(self, script: tuple[bool, ...], symbolic: frozenset[str], keywords: Mapping[str, Any]) -> Call:
        if not keywords and not self.rests():
            return self.remembered(script, symbolic)
        return self.trace(script, symbolic, {**self.arguments, self.rest: keywords})

    def remembered(
        self,
        script: tuple[bool, ...],
        symbolic: frozenset[str] = frozenset(),
        changed: Mapping[str, Any] | None = None,
    ) -> Call:
        key = (script, symbolic & set(self.values), tuple((changed or {}).items()))
        if key not in self.made:
            self.made[key] = self.trace(script, symbolic, self.replaced(changed or {}))
        return self.made[key]

    def trace(self, script: tuple[bool, ...], symbolic: frozenset[str], arguments: Mapping[str, Any]) -> Call:
        """The region's graph for these arguments, along one path; plain ones in `symbolic` are no constants.

        Raises: P407 for code that cannot be traced; Raised for what the code raises itself.
        """
        mode = new_mode()
        copy = fake_copy(self.module, mode)
        generated: Any = getattr(type(copy), "_peftc_kind", None)
        copy.__class__ = self.base if generated is None else exchanged(type(copy), generated.cls, self.base)
        vars(copy)["_modules"].pop(CONTAINER, None)
        tracer = GuardedTracer(lambda name: name in self.inline, script, symbolic)
        tracer.optional_results |= self.nones
        tracer.beforehand |= self.beforehand
        given = self.without_data(arguments, mode)
        try:
            with mode:
                return tracer.trace_region(copy, given), tracer
        except NoneAccess as error:
            if error.origin in self.nones:
                raise
            self.nones.add(error.origin)
            return self.trace(script, symbolic, arguments)
        except (TraceError, DataDependentOutputException) as error:
            raise PeftcError(
                Diagnostic(
                    "P407",
                    f"a call of {self.base.__name__} cannot be traced: {error}",
                    notes=(f"in the code of {tracer.call_stack[-1]}",) if tracer.call_stack else (),
                    help="edit a smaller part of the layer, so that this code is not entered",
                )
            ) from error
        except PeftcError:
            raise
        except Exception as error:
            raise Raised(error, (tracer.snapshot(), tracer)) from error

    def without_data(self, arguments: Mapping[str, Any], mode: FakeTensorMode) -> dict[str, Any]:
        """Raises: P407 for arguments that no fake tensor can stand for, such as nested tensors."""
        try:
            return fake_copy(dict(arguments), mode)
        except Exception as error:  # whatever copying an object or a kind of tensor raises
            message = f"a call of {self.base.__name__} has an argument that cannot be copied without its data"
            raise PeftcError(Diagnostic("P407", message, notes=(error_summary(error),))) from error

    def rests(self) -> Mapping[str, Any]:
        return self.arguments.get(self.rest, {})

    def replaced(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        own = {n: v for n, v in changed.items() if not n.startswith("**")}
        rest = {n[2:]: v for n, v in changed.items() if n.startswith("**")}
        return {**self.arguments, **own, **({self.rest: {**self.rests(), **rest}} if rest else {})}
