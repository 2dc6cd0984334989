"""Runs a skeleton on a sample, with hooks on every module that note what it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.fakes.data_answers import fake_data_answers, truth_answers, truth_questions
from peftc.fakes.tensors import fake_copy
from peftc.models.media import run_on_sample, tower_calls
from peftc.models.samples import copy_sample, further_samples
from peftc.modules.lazy_children import lazy_children, prototype_of
from peftc.modules.walk import Named, modules_outside, named_modules, submodule
from peftc.observation.call_arguments import BoundCall, CallArguments
from peftc.observation.first_tensor import first_tensor
from peftc.observation.layer_keys import structure_key
from peftc.observation.parameter_uses import ParameterUses
from peftc.observation.sample_forward import OBSERVER, ModuleCall, SampleForward, skip_repeated
from peftc.tracing.in_place import disable_function_modes


def observe(
    model: nn.Module,
    sample: Mapping[str, Any] | None,
    mode: FakeTensorMode,
    candidates: Collection[str],
    others: Collection[str] = (),
    kinds: Mapping[str, int] = MappingProxyType({}),
) -> SampleForward:
    """Runs the model on `sample`, or on inputs made for it; then towers that this misses.
    `candidates`: modules that may be layers. `others`: modules whose arguments are recorded, too.
    `kinds`: numbers that tell candidates of one structure apart.
    Raises: what the first call raises.
    """
    questions = truth_questions()
    record_of = partial(record_call, model, mode=mode, candidates=candidates, others=others, kinds=kinds)
    inputs, record = run_on_sample(model, sample, lambda inputs: record_of(lambda: model(**inputs)))
    record.sample = inputs
    for other in map(copy_sample, further_samples(sample)):
        record.extend(record_of(lambda other=other: model(**other)))

    def has_unreached_layers(name: str) -> bool:
        return any(layer.startswith(f"{name}.") for layer in record.unreached_layers)

    for call in tower_calls(model, inputs, has_unreached_layers) if record.unreached_layers else ():
        if not record.unreached_layers:
            break
        with contextlib.suppress(Exception):  # a tower does not take every form of its medium
            record.add(record_of(call, before=record), call.modality)
    if record.unreached_layers and truth_questions() > questions:
        # Seen in: no transformers model, but models that return early, or skip layers by a value
        with contextlib.suppress(Exception), truth_answers(False):
            record.extend(record_of(lambda: model(**inputs)))
    return record


def record_call(
    model: nn.Module,
    call: Callable[[], Any],
    mode: FakeTensorMode,
    candidates: Collection[str],
    before: SampleForward | None = None,
    others: Collection[str] = (),
    kinds: Mapping[str, int] = MappingProxyType({}),
) -> SampleForward:
    """Records one call. Repeated layers run only where the call fails without them. `before`: what
    earlier calls showed; a call that then fails counts if it reached more layers.
    """
    try:
        return Recorder(model, mode, candidates, others, kinds).run(call)
    except Exception:  # a layer may need what a skipped layer does
        return Recorder(model, mode, candidates, others, kinds).run(call, run_all=True, before=before)


class Recorder:
    """Forward hooks of every module, which note its calls in `record`."""

    def __init__(
        self,
        model: nn.Module,
        mode: FakeTensorMode,
        candidates: Collection[str],
        others: Collection[str] = (),
        kinds: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.others = frozenset(others)
        self.model, self.mode, self.record = model, mode, SampleForward(candidates=set(candidates))
        self.names, self.every = dict[int, str](), list[nn.Module]()
        self.observes_forwards = False
        key = cache(structure_key)  # of modules, which do not change meanwhile
        numbers = {id(submodule(model, name)): f" {number}" for name, number in kinds.items()}
        self.structure_key: Callable[[nn.Module], str]
        self.structure_key = lambda module: key(prototype_of(module)) + numbers.get(id(module), "")
        self.keys = set[str]()
        self.layer_keys: dict[tuple[str, str], str] = {}
        self.arguments = CallArguments()
        self.layers, self.modules = list[str](), list[str]()  # those that are running, the innermost last

    def run(self, call: Callable[[], Any], run_all: bool = False, before: SampleForward | None = None) -> SampleForward:
        skippable = [] if run_all else [submodule(self.model, n) for n in self.record.candidates]
        record, uses = self.record, ParameterUses(self.model, self.modules)
        skipping = skip_repeated(self.model, skippable, self.structure_key, record, self.arguments)
        try:
            with self.hooks(uses), self.mode, uses, fake_data_answers(), torch.no_grad(), skipping, self.direct_calls():
                call()
        except Exception:
            record.layers = {n: layer for n, layer in record.layers.items() if record.calls[n].output_shape}
            if before is None or not record.layers.keys() - before.layers.keys():
                raise
        record.external_reads, record.closure_reads = uses.external_reads(record.candidates), uses.closure_reads
        record.parameter_lines, record.closure_lines = uses.lines_by_name(), uses.closure_lines()
        record.token_products, record.weight_products = dict(uses.token_products), uses.weight_products
        return record

    @shielded
    def hooks(self, uses: ParameterUses) -> Generator[None]:
        """Inside, calls of modules are noted. `register_forward_hook` takes five times as long."""
        tables: dict[str, Any] = {"_forward_pre_hooks": self.enter, "_forward_hooks": self.leave}
        tables["_forward_pre_hooks_with_kwargs"] = True

        def observe(modules: Named) -> None:
            self.names |= {id(module): name for name, module in modules}
            for name, module in modules:
                if isinstance(module, torch.jit.ScriptModule):
                    message = f"`{name}` is a ScriptModule, whose code cannot be traced"
                    help_ = "put the module that was scripted in its place"
                    raise PeftcError(Diagnostic("P512", message, help=help_))
                self.every.append(module)
                for table, value in tables.items():
                    getattr(module, table)[OBSERVER] = value  # a module of edits makes its tables here

        def observe_children(layer: nn.Module) -> None:
            """Observes what is copied meanwhile as all others."""
            modules = named_modules(layer, self.names[id(layer)])[1:]
            observe(modules)
            uses.add(modules)
            if self.observes_forwards:
                self.set_forwards(module for _, module in modules)

        modules = modules_outside(self.model)
        lazy = [children for _, module in modules if (children := lazy_children(module)) is not None]
        try:
            for children in lazy:
                children.observers.append(observe_children)
            observe(modules)
            yield
        finally:
            for children in lazy:
                children.observers.remove(observe_children)
            for own in map(vars, self.every):
                for table in tables:
                    own[table].pop(OBSERVER, None)

    @shielded
    def direct_calls(self) -> Generator[None]:
        """Inside, calls of a module's `forward` are noted as calls of the module are by hooks."""
        forwards = {id(module): own for module in self.every if (own := vars(module).get("forward")) is not None}
        try:
            self.observes_forwards = True
            self.set_forwards(self.every)
            yield
        finally:
            self.observes_forwards = False
            for module in self.every:
                vars(module).pop("forward", None)
                if id(module) in forwards:
                    vars(module)["forward"] = forwards[id(module)]

    def set_forwards(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            vars(module)["forward"] = partial(self.run_forward, module, module.forward)

    def run_forward(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.modules and self.modules[-1] == self.names[id(module)]:  # a hook has noted the call
            return forward(*args, **kwargs)
        self.enter(module, args, kwargs)
        result = forward(*args, **kwargs)
        self.leave(module, args, result)
        return result

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record, name = self.record, self.names[id(module)]
        if self.modules:
            record.callers.setdefault(name, self.modules[-1])
        self.modules.append(name)
        if not self.layers:
            record.outside_layers.add(name)
        elif not f"{name}.".startswith(f"{self.layers[-1]}."):
            record.cross_layer_calls.setdefault(name, self.layers[-1])
        if name in record.candidates:
            self.layers.append(name)
        call = record.calls.setdefault(name, ModuleCall())
        call.count += 1
        bound = self.arguments.of(module, args, kwargs)
        if bound.first_input is not None:
            call.add_input(*bound.first_input)
        if call.count > 1:
            return
        if name in record.candidates:
            key = self.layer_key(module, bound)
            record.layers[name] = (key, fake_copy(bound.arguments, self.mode) if key not in self.keys else {})
            self.keys.add(key)
        if name in self.others:
            record.arguments[name] = (self.layer_key(module, bound), fake_copy(bound.arguments, self.mode))

    def layer_key(self, module: nn.Module, bound: BoundCall) -> str:
        parts = self.structure_key(module), bound.key
        if parts not in self.layer_keys:
            self.layer_keys[parts] = " ".join(parts)
        return self.layer_keys[parts]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names[id(module)]
        for running in (self.layers, self.modules):
            if running and running[-1] == name:
                running.pop()
        call = self.record.calls[name]
        with disable_function_modes():
            if (first := first_tensor(output)) is not None:
                call.add_output(first[0], tuple(first[1].shape))
