"""What one sample forward of a skeleton shows: which modules run, in which order, on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ModuleCall:
    """The calls of one module: how many, and the first tensor that goes in and out; its shape is `()`
    without one. A path leads to it: (parameter, *keys) in the arguments, keys in the result.
    """

    count: int = 0
    input_shape: tuple[int, ...] = ()
    input_path: tuple[Any, ...] = ()
    output_shape: tuple[int, ...] = ()
    output_path: tuple[Any, ...] = ()

    def complete(self, other: ModuleCall) -> None:
        """Takes over from another call what this one does not show."""
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
    image, a sound or the like reaches. `closure_reads`: modules that compute with a parameter in
    a closure, by its storage. `external_reads`: modules that compute with a parameter of another
    module, by its name.
    """

    calls: dict[str, ModuleCall] = field(default_factory=dict[str, ModuleCall])
    candidates: set[str] = field(default_factory=set[str])
    layers: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict[str, tuple[str, dict[str, Any]]])
    outside_layers: set[str] = field(default_factory=set[str])
    cross_layer_calls: dict[str, str] = field(default_factory=dict[str, str])
    modality: dict[str, str] = field(default_factory=dict[str, str])
    sample: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the arguments of the forward
    closure_reads: dict[int, str] = field(default_factory=dict[int, str])
    external_reads: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @property
    def unreached_layers(self) -> set[str]:
        return self.candidates - self.layers.keys()

    def add(self, other: SampleForward, modality: str) -> None:
        """Adds what a tower's call showed. Its modules come first: towers feed the model."""
        self.modality |= dict.fromkeys(other.layers.keys() - self.layers.keys(), modality)
        for name in other.calls.keys() & self.calls.keys():
            self.calls[name].complete(other.calls[name])
        self.calls = {**{n: c for n, c in other.calls.items() if n not in self.calls}, **self.calls}
        self.layers = {**other.layers, **self.layers}
        self.outside_layers |= other.outside_layers
        self.closure_reads = {**other.closure_reads, **self.closure_reads}
        self.cross_layer_calls = {**other.cross_layer_calls, **self.cross_layer_calls}
        for name, readers in other.external_reads.items():
            self.external_reads[name] = tuple(dict.fromkeys((*self.external_reads.get(name, ()), *readers)))


def first_tensor(value: Any) -> tuple[tuple[Any, ...], torch.Tensor] | None:
    """The first tensor in arguments or results, and its path; floating tensors come first."""
    leaves = [(path, leaf) for path, leaf in _leaves(value, ()) if isinstance(leaf, torch.Tensor)]
    floating = [(path, leaf) for path, leaf in leaves if leaf.is_floating_point()]
    return next(iter(floating or leaves), None)


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (tuple, list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value
