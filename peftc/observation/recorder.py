"""Runs a skeleton on a sample and records the calls of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.models.tower_samples import run_on_sample, tower_calls
from peftc.observation.parameter_uses import ParameterUses
from peftc.observation.sample_forward import (
    ModuleCall,
    SampleForward,
    arguments_key,
    first_tensor,
    skip_repeated,
    structure_key,
)
from peftc.tracing.module_calls import bind_arguments


def observe(
    model: nn.Module, sample: Mapping[str, Any] | None, mode: FakeTensorMode, candidates: Collection[str]
) -> SampleForward:
    """Runs the model on `sample`, or on inputs made for it; then towers that this misses. `candidates`
    are modules that may be layers. Raises: what the first call raises.
    """
    record_of = partial(record_call, model, mode=mode, candidates=candidates)
    inputs, record = run_on_sample(model, sample, lambda inputs: record_of(lambda: model(**inputs)))
    record.sample = inputs

    def has_unreached_layers(name: str) -> bool:
        return any(layer.startswith(f"{name}.") for layer in record.unreached_layers)

    for call in tower_calls(model, inputs, has_unreached_layers):
        if not record.unreached_layers:
            break
        with contextlib.suppress(Exception):  # a tower does not take every form of its medium
            record.add(record_of(call, before=record), call.modality)
    return record


def record_call(
    model: nn.Module,
    call: Callable[[], Any],
    mode: FakeTensorMode,
    candidates: Collection[str],
    before: SampleForward | None = None,
) -> SampleForward:
    """Records one call. Repeated layers run only where the call fails without them. `before`: what
    earlier calls showed; a call that then fails counts if it reached more layers.
    """
    try:
        return Recorder(model, mode, candidates).run(call)
    except Exception:  # a layer may need what a skipped layer does
        return Recorder(model, mode, candidates).run(call, run_all=True, before=before)


class Recorder:
    """Forward hooks of every module, which note its calls in `record`."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, candidates: Collection[str]) -> None:
        self.model, self.mode, self.record = model, mode, SampleForward(candidates=set(candidates))
        self.names = {id(m): n for n, m in model.named_modules()}
        self.keys = set[str]()
        self.layers, self.modules = list[str](), list[str]()  # those that are running, the innermost last

    def run(self, call: Callable[[], Any], run_all: bool = False, before: SampleForward | None = None) -> SampleForward:
        record, uses = self.record, ParameterUses(self.model, self.modules)
        handles = [m.register_forward_pre_hook(self.enter, with_kwargs=True) for m in self.model.modules()]
        handles += [m.register_forward_hook(self.leave) for m in self.model.modules()]
        skippable = [] if run_all else [self.model.get_submodule(n) for n in record.candidates]
        skipping = skip_repeated(self.model, skippable, record=record)
        try:
            with self.mode, uses, fake_data_answers(), torch.no_grad(), skipping:
                call()
        except Exception:
            record.layers = {n: layer for n, layer in record.layers.items() if record.calls[n].output_shape}
            if before is None or not record.layers.keys() - before.layers.keys():
                raise
        finally:
            for handle in handles:
                handle.remove()
        record.external_reads, record.closure_reads = uses.external_reads(record.candidates), uses.closure_reads
        return record

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record, name = self.record, self.names[id(module)]
        self.modules.append(name)
        if not self.layers:
            record.outside_layers.add(name)
        elif not f"{name}.".startswith(f"{self.layers[-1]}."):
            record.cross_layer_calls.setdefault(name, self.layers[-1])
        if name in record.candidates:
            self.layers.append(name)
        call = record.calls.setdefault(name, ModuleCall())
        call.count += 1
        if call.count > 1:
            return
        if (first := first_tensor((args, kwargs))) is not None:
            call.input_shape, call.input_path = tuple(first[1].shape), input_path(module, args, kwargs)
        if name in record.candidates:
            arguments = bind_arguments(type(module).forward, module, args, kwargs)
            key = f"{structure_key(module)} {arguments_key(arguments)}"
            record.layers[name] = (key, fake_copy(arguments, self.mode) if key not in self.keys else {})
            self.keys.add(key)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names[id(module)]
        for running in (self.layers, self.modules):
            if running and running[-1] == name:
                running.pop()
        call = self.record.calls[name]
        if not call.output_shape and (first := first_tensor(output)) is not None:
            call.output_path, call.output_shape = first[0], tuple(first[1].shape)


def input_path(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The path to the first tensor by the parameters of the class's forward; () if none fits."""
    first = None
    with contextlib.suppress(TypeError, ValueError):  # a forward of the instance takes other arguments
        first = first_tensor(bind_arguments(type(module).forward, module, args, kwargs))
    return () if first is None else first[0]
