"""One sample forward of a skeleton, recorded: which modules run, in which order, on what.

Layers that repeat another are skipped, so that it costs the same at any depth. A layer repeats
another if their structures and arguments agree, shapes included, and if the first called no modules
but its own. Layers whose keys agree can share one traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.dataflow.operations import Op
from peftc.diagnostics.model_line import ModelLine
from peftc.modules.walk import modules_outside, outline
from peftc.observation.call_arguments import CallArguments
from peftc.observation.layer_keys import structure_key

OBSERVER = "peftc"  # the key of the hooks of an observation; torch's are numbers


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

    def repeated(self, count: int) -> ModuleCall:
        """What as many calls like these show."""
        call = object.__new__(ModuleCall)  # a quarter of the time of its constructor
        call.__dict__.update(self.__dict__)
        call.count = count
        return call

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
    `closure_lines`: where they do so.
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
    closure_lines: dict[int, ModelLine] = field(default_factory=dict[int, ModelLine])
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
        self.closure_lines = {**other.closure_lines, **self.closure_lines}
        self.cross_layer_calls = {**other.cross_layer_calls, **self.cross_layer_calls}
        for name, readers in other.external_reads.items():
            self.external_reads[name] = tuple(dict.fromkeys((*self.external_reads.get(name, ()), *readers)))


@shielded
def skip_repeated(
    model: nn.Module,
    layers: Iterable[nn.Module],
    key: Callable[[nn.Module], str] = structure_key,
    record: SampleForward | None = None,
    calls: CallArguments | None = None,
) -> Generator[None]:
    """Inside the block, each of `layers` runs only if it repeats no layer that has run, or if hooks
    in it look at calls: those of the model's code, which a skipped layer would not make.

    Args: `key`: the structure of a layer. `record`: gets the calls that a skipped layer would make.
    `calls`: the arguments of calls, which others ask for, too.
    """
    forwards = [(layer, vars(layer).get("forward")) for layer in layers if not _hooks_inside(layer)]
    repeats = _Repeats(model, key, record or SampleForward(), calls or CallArguments())
    try:
        for layer, _ in forwards:
            vars(layer)["forward"] = repeats.forward(layer, layer.forward)
        yield
    finally:
        for layer, forward in forwards:
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


def _hooks_inside(layer: nn.Module) -> bool:
    """Whether parts of a layer, but for lazy ones, have hooks besides those of an observation."""
    parts = (vars(part) for _, part in modules_outside(layer)[1:])  # those of edits lack some tables
    hooks = (own.get(table, ()) for own in parts for table in ("_forward_hooks", "_forward_pre_hooks"))
    return any(key != OBSERVER for keys in hooks for key in keys)


@dataclass
class _Run:
    """The run of a layer. `counts`: of the calls of each module during it."""

    name: str
    result: Any
    counts: dict[str, int]

    callers: Mapping[str, str]

    @cached_property
    def parts(self) -> list[str] | None:
        """The names of the modules without that of the layer; None if some are not in it."""
        inside = f"{self.name}."
        return [n[len(self.name) :] for n in self.counts] if all(n.startswith(inside) for n in self.counts) else None

    @cached_property
    def parts_of_callers(self) -> list[str]:
        """The names of the modules that call them first, without that of the layer."""
        return [self.callers[name][len(self.name) :] for name in self.counts]


class _Repeats:
    """The layers that ran in one sample forward."""

    def __init__(
        self, model: nn.Module, key: Callable[[nn.Module], str], record: SampleForward, arguments: CallArguments
    ) -> None:
        self.names = {id(m): n for n, m in modules_outside(model)}
        self.key, self.record, self.arguments = key, record, arguments
        self.modules = frozenset([name for name, _ in outline(model)])
        self.runs: dict[tuple[str, str], _Run] = {}

    def forward(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of `layer` that returns the result of a repeated layer, or calls `run`."""
        name, structure = self.names[id(layer)], self.key(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = structure, self.arguments.of(layer, args, kwargs).exact_key
            if key in self.runs and self.repeat(self.runs[key], name):
                return self.runs[key].result
            before = {n: call.count for n, call in self.record.calls.items()}
            result = run(*args, **kwargs)
            more = {n: call.count - before.get(n, 0) for n, call in self.record.calls.items()}
            self.runs.setdefault(key, _Run(name, result, {n: c for n, c in more.items() if c}, self.record.callers))
            return result

        return forward

    def repeat(self, run: _Run, name: str) -> bool:
        """Records a run's calls for layer `name`; False if the run left its layer."""
        if run.parts is None:
            return False
        modules = [name + part for part in run.parts]
        if not self.modules.issuperset(modules):
            return False
        calls, callers = self.record.calls, self.record.callers
        for module, caller, (first, count) in zip(modules, run.parts_of_callers, run.counts.items(), strict=True):
            if module not in callers:
                callers[module] = name + caller
            if (call := calls.get(module)) is None:
                calls[module] = calls[first].repeated(count)
            else:
                call.count += count
                call.complete(calls[first])
        return True
