"""One sample forward of a skeleton, recorded: which modules run, in which order, on what.

Layers that repeat another are skipped, so that it costs the same at any depth. A layer repeats
another if their structures and arguments agree, shapes included, and if the first called no modules
but its own. Layers whose keys agree can share one traced graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.concurrency.interrupts import shielded
from peftc.dataflow.operations import Op
from peftc.diagnostics.model_line import ModelLine
from peftc.fakes.data_answers import fake_data_answers, truth_answers, truth_questions
from peftc.fakes.tensors import fake_copy
from peftc.models.media import run_on_sample, tower_calls
from peftc.models.samples import further_samples
from peftc.modules.walk import named_modules
from peftc.observation.first_tensor import first_tensor, input_path
from peftc.observation.layer_keys import arguments_key, structure_key
from peftc.observation.parameter_uses import ParameterUses
from peftc.tracing.in_place import disable_function_modes
from peftc.tracing.module_calls import bind_arguments

_HOOK = "peftc"  # the key of hooks; torch's are numbers


@dataclass
class ModuleCall:
    """The calls of one module: how many, and the first tensor that goes in and out, of shape `()`
    if none. A path leads to it: (parameter, *keys) in the arguments, keys in the result. `varies`:
    whether another call has another rank or path, or other features in the last dimension.
    """

    count: int = 0
    input_shape: tuple[int, ...] = ()
    input_path: tuple[Any, ...] = ()
    output_shape: tuple[int, ...] = ()
    output_path: tuple[Any, ...] = ()
    varies: bool = False

    def add_input(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        if not self.input_shape:
            self.input_shape, self.input_path = shape, path
        self.varies |= (path, len(shape), shape[-1:]) != (self.input_path, len(self.input_shape), self.input_shape[-1:])

    def add_output(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> None:
        if not self.output_shape:
            self.output_shape, self.output_path = shape, path
        own = (self.output_path, len(self.output_shape), self.output_shape[-1:])
        self.varies |= (path, len(shape), shape[-1:]) != own

    def compare(self, other: ModuleCall) -> None:
        """Takes over what another sample's call shows; notes where the two differ."""
        self.varies |= other.varies
        if other.input_shape:
            self.add_input(other.input_path, other.input_shape)
        if other.output_shape:
            self.add_output(other.output_path, other.output_shape)

    def complete(self, other: ModuleCall) -> None:
        """Takes over from another call what this one does not show."""
        self.varies |= other.varies
        if not self.input_shape:
            self.input_shape, self.input_path = other.input_shape, other.input_path
        if not self.output_shape:
            self.output_shape, self.output_path = other.output_shape, other.output_path


@dataclass
class SampleForward:
    """What a sample forward showed, by dotted names.

    `calls`: in the order of the first calls. `candidates`: modules that may be layers. `layers`:
    a key per layer, equal for layers that can share a trace, with the arguments of the first
    layer of each key. `outside_layers`: modules called outside of layers. `cross_layer_calls`:
    modules of one layer with another layer that calls them. `modality`: of layers that only an
    image, a sound or the like reaches. `callers`: of each module the one whose code calls it first.
    `arguments`: of the first calls of further modules, with a key as in `layers`.
    `closure_reads`: modules that compute with a parameter in a closure, by its storage.
    `external_reads`: modules that compute with a parameter of another module, by its name.
    `token_products`: modules that run an attention, a softmax or a product of matrices.
    `weight_products`: modules that multiply by a weight of their own. `parameter_lines`: where code
    computes with a parameter of another module, by its name.
    """

    calls: dict[str, ModuleCall] = field(default_factory=dict[str, ModuleCall])
    candidates: set[str] = field(default_factory=set[str])
    layers: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict[str, tuple[str, dict[str, Any]]])
    outside_layers: set[str] = field(default_factory=set[str])
    callers: dict[str, str] = field(default_factory=dict[str, str])
    arguments: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict[str, tuple[str, dict[str, Any]]])
    cross_layer_calls: dict[str, str] = field(default_factory=dict[str, str])
    modality: dict[str, str] = field(default_factory=dict[str, str])
    sample: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the arguments of the forward
    closure_reads: dict[int, str] = field(default_factory=dict[int, str])
    external_reads: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    token_products: dict[Op, set[str]] = field(default_factory=dict[Op, set[str]])
    weight_products: set[str] = field(default_factory=set[str])
    parameter_lines: dict[str, ModelLine] = field(default_factory=dict[str, ModelLine])

    @property
    def unreached_layers(self) -> set[str]:
        return self.candidates - self.layers.keys()

    def extend(self, other: SampleForward) -> None:
        """Adds what a further sample showed. Its modules come behind those of earlier ones."""
        for name, call in other.calls.items():
            if (own := self.calls.setdefault(name, call)) is not call:
                own.compare(call)
        known = {key for key, _ in self.layers.values()}
        arguments = dict(reversed(other.layers.values()))  # the first has them
        for name, (key, _) in other.layers.items():
            if name not in self.layers:
                self.layers[name] = (key, {} if key in known else arguments[key])
                known.add(key)
        self._merge_reads(other)

    def add(self, other: SampleForward, modality: str) -> None:
        """Adds what a tower's call showed. Its modules come first: towers feed the model."""
        self.modality |= dict.fromkeys(other.layers.keys() - self.layers.keys(), modality)
        for name in other.calls.keys() & self.calls.keys():
            self.calls[name].complete(other.calls[name])
        self.calls = {**{n: c for n, c in other.calls.items() if n not in self.calls}, **self.calls}
        self.layers = {**other.layers, **self.layers}
        self._merge_reads(other)

    def _merge_reads(self, other: SampleForward) -> None:
        self.outside_layers |= other.outside_layers
        self.callers = {**other.callers, **self.callers}
        self.arguments = {**other.arguments, **self.arguments}
        for op, names in other.token_products.items():
            self.token_products[op] = self.token_products.get(op, set()) | names
        self.weight_products |= other.weight_products
        self.parameter_lines = {**other.parameter_lines, **self.parameter_lines}
        self.closure_reads = {**other.closure_reads, **self.closure_reads}
        self.cross_layer_calls = {**other.cross_layer_calls, **self.cross_layer_calls}
        for name, readers in other.external_reads.items():
            self.external_reads[name] = tuple(dict.fromkeys((*self.external_reads.get(name, ()), *readers)))


@shielded
def skip_repeated(
    model: nn.Module,
    layers: Iterable[nn.Module],
    key: Callable[[nn.Module], str] = structure_key,
    record: SampleForward | None = None,
) -> Generator[None]:
    """Inside the block, each of `layers` runs only if it repeats no layer that has run.

    Args: `key`: the structure of a layer. `record`: gets the calls that a skipped layer would make.
    """
    forwards = [(layer, vars(layer).get("forward")) for layer in layers]
    repeats = _Repeats(model, key, record or SampleForward())
    try:
        for layer, _ in forwards:
            vars(layer)["forward"] = repeats.forward(layer, layer.forward)
        yield
    finally:
        for layer, forward in forwards:
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


@dataclass
class _Run:
    name: str
    result: Any
    counts: dict[str, int]  # of the calls of each module during the run
    parts: list[str] | None = None  # their names without that of the layer, if they are in it


class _Repeats:
    """The layers that ran in one sample forward."""

    def __init__(self, model: nn.Module, key: Callable[[nn.Module], str], record: SampleForward) -> None:
        self.names = {id(m): n for n, m in named_modules(model)}
        self.key, self.record = key, record
        self.modules = frozenset(self.names.values())
        self.runs: dict[str, _Run] = {}

    def forward(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of `layer` that returns the result of a repeated layer, or calls `run`."""
        name, structure = self.names[id(layer)], self.key(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = f"{structure} {arguments_key(bind_arguments(type(layer).forward, layer, args, kwargs), exact=True)}"
            if key in self.runs and self.repeat(self.runs[key], name):
                return self.runs[key].result
            before = {n: call.count for n, call in self.record.calls.items()}
            result = run(*args, **kwargs)
            more = {n: call.count - before.get(n, 0) for n, call in self.record.calls.items()}
            self.runs.setdefault(key, _Run(name, result, {n: count for n, count in more.items() if count}))
            return result

        return forward

    def repeat(self, run: _Run, name: str) -> bool:
        """Records a run's calls for layer `name`; False if the run left its layer."""
        start, inside = len(run.name), f"{run.name}."
        if run.parts is None:
            run.parts = [n[start:] for n in run.counts if n.startswith(inside)]
        if len(run.parts) < len(run.counts) or not self.modules.issuperset([name + part for part in run.parts]):
            return False
        calls, callers = self.record.calls, self.record.callers
        for part, count in zip(run.parts, run.counts.values(), strict=True):
            first, module = run.name + part, name + part
            if (call := calls.get(module)) is None:
                call = calls[module] = ModuleCall()
            if module not in callers:
                callers[module] = name + callers[first][start:]
            call.count += count
            call.complete(calls[first])
        return True


def observe(
    model: nn.Module,
    sample: Mapping[str, Any] | None,
    mode: FakeTensorMode,
    candidates: Collection[str],
    others: Collection[str] = (),
) -> SampleForward:
    """Runs the model on `sample`, or on inputs made for it; then towers that this misses.
    `candidates`: modules that may be layers. `others`: modules whose arguments are recorded, too.
    Raises: what the first call raises.
    """
    questions = truth_questions()
    record_of = partial(record_call, model, mode=mode, candidates=candidates, others=others)
    inputs, record = run_on_sample(model, sample, lambda inputs: record_of(lambda: model(**inputs)))
    record.sample = inputs
    for other in further_samples(sample):
        record.extend(record_of(lambda other=other: model(**other)))

    def has_unreached_layers(name: str) -> bool:
        return any(layer.startswith(f"{name}.") for layer in record.unreached_layers)

    for call in tower_calls(model, inputs, has_unreached_layers):
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
) -> SampleForward:
    """Records one call. Repeated layers run only where the call fails without them. `before`: what
    earlier calls showed; a call that then fails counts if it reached more layers.
    """
    try:
        return Recorder(model, mode, candidates, others).run(call)
    except Exception:  # a layer may need what a skipped layer does
        return Recorder(model, mode, candidates, others).run(call, run_all=True, before=before)


class Recorder:
    """Forward hooks of every module, which note its calls in `record`."""

    def __init__(
        self, model: nn.Module, mode: FakeTensorMode, candidates: Collection[str], others: Collection[str] = ()
    ) -> None:
        self.others = frozenset(others)
        self.model, self.mode, self.record = model, mode, SampleForward(candidates=set(candidates))
        named = named_modules(model)
        self.names, self.every = {id(m): n for n, m in named}, [module for _, module in named]
        self.structure_key = cache(structure_key)  # of modules, which do not change meanwhile
        self.keys = set[str]()
        self.layers, self.modules = list[str](), list[str]()  # those that are running, the innermost last

    def run(self, call: Callable[[], Any], run_all: bool = False, before: SampleForward | None = None) -> SampleForward:
        record, uses = self.record, ParameterUses(self.model, self.modules)
        skippable = [] if run_all else [self.model.get_submodule(n) for n in record.candidates]
        skipping = skip_repeated(self.model, skippable, self.structure_key, record)
        try:
            with self.hooks(), self.mode, uses, fake_data_answers(), torch.no_grad(), skipping, self.direct_calls():
                call()
        except Exception:
            record.layers = {n: layer for n, layer in record.layers.items() if record.calls[n].output_shape}
            if before is None or not record.layers.keys() - before.layers.keys():
                raise
        record.external_reads, record.closure_reads = uses.external_reads(record.candidates), uses.closure_reads
        record.parameter_lines = uses.lines_by_name()
        record.token_products, record.weight_products = dict(uses.token_products), uses.weight_products
        return record

    @shielded
    def hooks(self) -> Generator[None]:
        """Inside, calls of modules are noted. `register_forward_hook` takes five times as long."""
        tables: dict[str, Any] = {"_forward_pre_hooks": self.enter, "_forward_hooks": self.leave}
        tables["_forward_pre_hooks_with_kwargs"] = True
        modules = self.every
        if scripted := [self.names[id(m)] for m in modules if isinstance(m, torch.jit.ScriptModule)]:
            raise RuntimeError(f"`{scripted[0]}` is a ScriptModule, whose code cannot be traced")
        try:
            for own in map(vars, modules):
                for name, value in tables.items():
                    own[name][_HOOK] = value
            yield
        finally:
            for own in map(vars, modules):
                for name in tables:
                    own[name].pop(_HOOK, None)

    @shielded
    def direct_calls(self) -> Generator[None]:
        """Inside, calls of a module's `forward` are noted as calls of the module are by hooks."""
        forwards = [(module, vars(module).get("forward")) for module in self.every]
        try:
            for module, _ in forwards:
                vars(module)["forward"] = partial(self.run_forward, module, module.forward)
            yield
        finally:
            for module, forward in forwards:
                vars(module).pop("forward", None)
                if forward is not None:
                    vars(module)["forward"] = forward

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
        arguments = None
        with disable_function_modes():
            if (first := first_tensor((args, kwargs))) is not None:
                arguments = bound_arguments(module, args, kwargs)
                call.add_input(input_path(arguments), tuple(first[1].shape))
        if call.count > 1:
            return
        if name in record.candidates:
            if arguments is None:
                arguments = bind_arguments(type(module).forward, module, args, kwargs)
            key = f"{self.structure_key(module)} {arguments_key(arguments)}"
            record.layers[name] = (key, fake_copy(arguments, self.mode) if key not in self.keys else {})
            self.keys.add(key)
        if name in self.others:
            arguments = bind_arguments(type(module).forward, module, args, kwargs)
            key = f"{self.structure_key(module)} {arguments_key(arguments)}"
            record.arguments[name] = (key, fake_copy(arguments, self.mode))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names[id(module)]
        for running in (self.layers, self.modules):
            if running and running[-1] == name:
                running.pop()
        call = self.record.calls[name]
        with disable_function_modes():
            if (first := first_tensor(output)) is not None:
                call.add_output(first[0], tuple(first[1].shape))


def bound_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by the parameters of the class's forward; None if they do not fit."""
    with contextlib.suppress(TypeError, ValueError):  # a forward of the instance takes other arguments
        return bind_arguments(type(module).forward, module, args, kwargs)
    return None
