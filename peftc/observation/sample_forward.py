"""One sample forward of a skeleton, watched: which modules run, in which order, on what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.models.tower_samples import on_sample, part_calls
from peftc.observation.parameter_uses import ParameterUses, merged
from peftc.observation.repeated_layers import Repeats, repeated
from peftc.tracing.module_calls import bind_arguments


@dataclass
class SampleForward:
    """What a sample forward showed. Names are dotted names of the model; shapes are of the first tensor in or out, and `entries` and
    `results` say where that is: (parameter, *keys) in the arguments, keys in the result.
    """

    order: list[str] = field(default_factory=list[str])
    calls: dict[str, int] = field(default_factory=dict[str, int])
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    entries: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    results: dict[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    layers: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict[str, tuple[str, dict[str, Any]]])
    candidates: set[str] = field(default_factory=set[str])  # what may be a layer
    outer: set[str] = field(default_factory=set[str])  # what is called while none of these runs
    modality: dict[str, str] = field(default_factory=dict[str, str])  # what a layer is for, where only that reaches it
    sample: Mapping[str, Any] = field(default_factory=dict[str, Any])  # the arguments of the forward
    captured: dict[int, str] = field(
        default_factory=dict[int, str]
    )  # who computes with a parameter in a closure, by storage
    guests: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # modules of layers, and another layer that calls them, too
    elsewhere: dict[str, tuple[str, ...]] = field(
        default_factory=dict[str, tuple[str, ...]]
    )  # who computes with a parameter, too

    @property
    def missing(self) -> set[str]:
        """Layers that no call has reached."""
        return self.candidates - self.layers.keys()

    def unseen(self, name: str) -> bool:
        """Whether a module has such layers."""
        return any(layer.startswith(name + ".") for layer in self.missing)

    def add(self, other: SampleForward, modality: str) -> None:
        """What one more call showed of modules that were not called before. It comes first: parts feed the whole."""
        fresh = [n for n in other.order if n not in self.calls]
        self.order[:0] = fresh
        for layer in other.layers.keys() - self.layers.keys():
            self.modality[layer] = modality
        self.calls = {**other.calls, **self.calls}
        self.inputs, self.outputs = {**other.inputs, **self.inputs}, {**other.outputs, **self.outputs}
        self.entries, self.results = {**other.entries, **self.entries}, {**other.results, **self.results}
        self.layers = {**other.layers, **self.layers}
        self.outer |= other.outer
        self.captured = {**other.captured, **self.captured}
        self.guests = {**other.guests, **self.guests}
        self.elsewhere = merged(self.elsewhere, other.elsewhere)


def first_tensor(value: Any) -> tuple[tuple[Any, ...], torch.Tensor] | None:
    """The first floating tensor in arguments or results, behind the keys that lead to it; the first of any type where none floats."""
    flat = [(path, v) for path, v in flattened(value) if isinstance(v, torch.Tensor)]
    floating = [(path, v) for path, v in flat if v.is_floating_point()]
    return next(iter(floating or flat), None)


def flattened(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (tuple, list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flattened(item, (*path, key))
    else:
        yield path, value


def observe(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, blocks: Collection[str]
) -> SampleForward:
    """Runs the model once on `sample`, or on inputs made for it; and then those parts of it that this does not reach.

    `blocks`: the names of what may be a layer. `layers` keeps, for the first layer of each kind, a copy of its bound arguments.
    """
    inputs, seen = on_sample(model, sample, lambda given: observed(model, lambda: model(**given), mode, blocks))
    seen.sample = inputs
    for call in part_calls(model, inputs, seen.unseen):
        if not seen.missing:
            break
        with contextlib.suppress(Exception):  # what was tried is not what this part takes
            seen.add(observed(model, call, mode, blocks, seen), call.modality)
    return seen


def observed(
    model: nn.Module,
    call: Callable[[], Any],
    mode: FakeTensorMode,
    blocks: Collection[str],
    known: SampleForward | None = None,
) -> SampleForward:
    """One call, watched. With `known` it is one of a part, and may fail once that has run."""
    try:
        return watched(model, call, mode, blocks, every=False)
    except Exception:  # a layer may need what another one that was left out does
        return watched(model, call, mode, blocks, every=True, partial=known)


def watched(
    model: nn.Module,
    call: Callable[[], Any],
    mode: FakeTensorMode,
    blocks: Collection[str],
    every: bool,
    partial: SampleForward | None = None,
) -> SampleForward:
    """One call, watched; with `every` layer, or only those that are not like one that has run."""
    names = {id(m): n for n, m in model.named_modules()}
    candidates = set(blocks)
    seen = SampleForward(candidates=candidates)
    kinds: set[str] = set()
    running: list[str] = []
    called: list[str] = []
    uses = ParameterUses(model, called)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = names[id(module)]
        called.append(name)
        seen.calls[name] = seen.calls.get(name, 0) + 1
        if not running:
            seen.outer.add(name)
        elif not f"{name}.".startswith(f"{running[-1]}."):
            seen.guests.setdefault(name, running[-1])
        if name in candidates:
            running.append(name)
        if seen.calls[name] > 1:
            return
        seen.order.append(name)
        if (first := first_tensor((args, kwargs))) is not None:
            seen.inputs[name] = tuple(first[1].shape)
            seen.entries[name] = entry(module, args, kwargs)
        if name in candidates:
            arguments = bind_arguments(type(module).forward, module, args, kwargs)
            kind = f"{structure(module)} {signature(arguments)}"
            seen.layers[name] = (kind, fake_copy(arguments, mode) if kind not in kinds else {})
            kinds.add(kind)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if running and running[-1] == names[id(module)]:
            running.pop()
        if called and called[-1] == names[id(module)]:
            called.pop()
        if (first := first_tensor(output)) is not None:
            seen.outputs.setdefault(names[id(module)], tuple(first[1].shape))
            seen.results.setdefault(names[id(module)], first[0])

    handles = [m.register_forward_pre_hook(before, with_kwargs=True) for m in model.modules()]
    handles += [m.register_forward_hook(after, with_kwargs=True) for m in model.modules()]
    skipping = [] if every else [model.get_submodule(n) for n in candidates]
    try:
        with mode, uses, fake_data_answers(), torch.no_grad(), repeated(skipping, Repeats(names, seen, structure)):
            call()
    except Exception:
        seen.layers = {n: kept for n, kept in seen.layers.items() if n in seen.outputs}
        if partial is None or not seen.layers.keys() - partial.layers.keys():
            raise
    finally:
        for handle in handles:
            handle.remove()
    seen.elsewhere, seen.captured = uses.elsewhere(candidates), uses.captured
    return seen


def entry(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Where the first tensor is in the arguments of a call, by the names of the module's own parameters; () where they have none."""
    try:
        first = first_tensor(bind_arguments(type(module).forward, module, args, kwargs))
    except (TypeError, ValueError):  # a forward of the instance that takes other arguments
        return ()
    return () if first is None else first[0]


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that a transformer repeats: its layers.

    transformers marks them (`GradientCheckpointingLayer`); else they are the elements of lists of one class.
    """
    marked = [n for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]
    marked = outermost([n for n in marked if not holds_list(model, n, marked)])
    return [*marked, *unmarked_blocks(model, marked)]


def unmarked_blocks(model: nn.Module, marked: list[str]) -> list[str]:
    """The elements of lists that neither hold marked layers nor are part of one."""
    around = {".".join(n.split(".")[:i]) for n in marked for i in range(len(n.split(".")))}
    inside = tuple(f"{n}." for n in marked)
    lists = [
        (n, m)
        for n, m in model.named_modules()
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and n not in around and not (inside and n.startswith(inside))
    ]
    found: list[str] = []
    for name, children in lists:
        if len({type(c) for c in children}) != 1 or any(name.startswith(f + ".") for f in found):
            continue
        if all(sum(p.ndim == 2 for p in c.parameters()) >= 2 for c in children):
            found += [f"{name}.{i}".lstrip(".") for i in range(len(children))]
    return found


def holds_list(model: nn.Module, name: str, blocks: list[str]) -> bool:
    """Whether a block holds a list of others: a stage then, and not a layer of which they are parts."""
    inside = [b.removeprefix(f"{name}.").split(".") for b in blocks if b.startswith(f"{name}.")]
    around = {".".join([name, *steps[:i]]) for steps in inside for i in range(1, len(steps))}
    return any(isinstance(model.get_submodule(n), (nn.ModuleList, nn.Sequential)) for n in around)


def list_around(model: nn.Module, layer: str) -> str:
    """The list that a layer is in, maybe inside of a wrapper; else the module that it is a part of."""
    parts = layer.split(".")
    around = [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
    lists = (name for name in around if isinstance(model.get_submodule(name), (nn.ModuleList, nn.Sequential)))
    return next(lists, layer.rpartition(".")[0])


def outermost(blocks: list[str]) -> list[str]:
    return [b for b in blocks if not any(b.startswith(f"{other}.") for other in blocks)]


def structure(module: nn.Module) -> str:
    """A text that two modules share exactly if their class trees and parameter shapes agree. Classes may share a name."""
    parts: list[str] = []
    for name, child in module.named_modules():
        shapes = ",".join(f"{n}{tuple(p.shape)}" for n, p in child.named_parameters(recurse=False))
        parts.append(f"{name}:{type(child).__qualname__}@{id(type(child))}[{shapes}]")
    return ";".join(parts)


def signature(value: Any) -> str:
    """What Python code can see of arguments without looking into tensors."""
    if isinstance(value, torch.Tensor):
        return f"{value.ndim}d"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}={signature(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(signature, value)) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__
