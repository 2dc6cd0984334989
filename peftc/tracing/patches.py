"""What a trace patches: modules, the attention registry, and functions of torch that would not accept proxies."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from transformers.modeling_utils import AttentionInterface

from peftc.concurrency.interrupts import shielded
from peftc.tracing.context_managers import patch_attribute, patch_context_managers
from peftc.tracing.operations import attention, autograd_function, script_function
from peftc.tracing.proxy import contains_proxy
from peftc.tracing.tensor_provenance import RecordedCall
from peftc.tracing.tracer_base import TracerBase, current_tracer

FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "tensor", "linspace", "rand", "randn")
TAKE_SIZES = ("reshape", "broadcast_to", "tile", "narrow", "split")  # torch converts sizes in the arguments to numbers
CRASH = ("where",)  # ends the process when its second argument only looks like a tensor and the third is a number

_instrumented: dict[type, type] = {}
_patching = threading.RLock()  # reentrant: a leaf that runs while examples are computed may be traced itself


def instrument(cls: type) -> type:
    """A subclass of a module class that reports calls and reads of numbers to the current tracer."""
    if cls in _instrumented:
        return _instrumented[cls]
    parent: Any = cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return parent.__call__(self, *args, **kwargs)
        return tracer.call_module(self, parent.__call__, args, kwargs)

    def __getattribute__(self: Any, name: str) -> Any:
        value = parent.__getattribute__(self, name)
        if type(value) not in (bool, int, float):
            return value
        tracer = current_tracer()
        return value if tracer is None else tracer.read_attribute(self, name, value)

    members = {"__call__": __call__, "__getattribute__": __getattribute__, "__module__": cls.__module__}
    subclass = _instrumented[cls] = type(cls.__name__, (cls,), members)
    return subclass


@shielded
def instrument_modules(root: nn.Module) -> Generator[None]:
    modules = [(module, type(module)) for module in root.modules()]
    try:
        for module, cls in modules:
            module.__class__ = instrument(cls)
        yield
    finally:
        for module, cls in modules:
            module.__class__ = cls


@shielded
def patch_libraries(tracer: TracerBase) -> Generator[None]:
    """Inside, torch and transformers record to `tracer` what neither proxies nor instrumented modules would see."""
    autograd, script = torch.autograd.Function, torch.jit.ScriptFunction
    with _patching, contextlib.ExitStack() as patches:
        patches.enter_context(patch_attribute(AttentionInterface, "get_interface", _recording_interface))
        for name in FACTORIES + TAKE_SIZES + CRASH:
            patches.enter_context(patch_attribute(torch, name, _recording_function))
        patches.enter_context(patch_attribute(torch, "_check_with", _guarding_check))
        patches.enter_context(patch_context_managers())
        patches.enter_context(patch_attribute(script, "__call__", _recording_script_function))
        patches.enter_context(
            patch_attribute(checkpoint, "_checkpoint_without_reentrant_generator", _transparent_checkpoint)
        )
        patches.enter_context(patch_attribute(nn.functional, "multi_head_attention_forward", _transparent_attention))
        patches.enter_context(_patch_apply(autograd))
        patches.enter_context(tracer.activate())
        yield


class ProvenanceMode(TorchFunctionMode):
    """Records calls of torch: with a proxy as nodes, without one in the tracer's provenance."""

    def __init__(self, tracer: TracerBase) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, tracer = kwargs or {}, self.tracer
        call = RecordedCall.of(func, args, kwargs, tracer.graph) if tracer.recording else None
        if call is None:
            return func(*args, **kwargs)
        if contains_proxy((call.args, call.kwargs)):
            return tracer.record(call.kind, call.target, call.args, call.kwargs)
        with tracer.pause():  # what torch's own code does is not part of the region
            result = func(*args, **kwargs)
        tracer.provenance.record(call, args[0] if call.target is operator.setitem else result)
        return result


def _recording_tracer(*values: Any) -> TracerBase | None:
    """The current tracer, where one of `values` is traced."""
    tracer = current_tracer()
    return tracer if tracer is not None and contains_proxy(values) else None


def _recording_function(function: Any) -> Any:
    def recording_function(*args: Any, **kwargs: Any) -> Any:
        tracer = _recording_tracer(args, kwargs)
        return function(*args, **kwargs) if tracer is None else tracer.record("call_function", function, args, kwargs)

    return recording_function


def _recording_interface(get_interface: Any) -> Any:
    def recording_get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return get_interface(self, attn_implementation, default)

        def call(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return tracer.record("call_function", attention, (module, default, query, key, value, *args), kwargs)

        return call

    return recording_get_interface


@contextlib.contextmanager
def _patch_apply(owner: Any) -> Generator[None]:
    """Calls of autograd functions become leaves: their C code would take proxies for tensors."""
    original = vars(owner)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _recording_tracer(args, kwargs)
        if tracer is None:
            return original.__func__(cls, *args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            function, _, *arguments = args
            return function(*arguments)
        return tracer.record("call_function", autograd_function, args, {**kwargs, "function": cls})

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        owner.apply = original


def _recording_script_function(call: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _recording_tracer(args, kwargs)
        if tracer is None:
            return call(self, *args, **kwargs)
        return tracer.record("call_function", script_function, args, {**kwargs, "function": self})

    return __call__


def _transparent_checkpoint(generator: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint around traced code does nothing: it would save proxies for the backward pass as if they were tensors."""

    def transparent_generator(*args: Any, **kwargs: Any) -> Generator[None]:
        if _recording_tracer(args, kwargs) is None:
            yield from generator(*args, **kwargs)
        else:
            yield

    return transparent_generator


def _transparent_attention(function: Any) -> Any:
    """torch's own multi-head attention is traced through: it is written in Python."""

    def transparent_function(*args: Any, **kwargs: Any) -> Any:
        if _recording_tracer(args, kwargs) is None:
            return function(*args, **kwargs)
        with patch_attribute(nn.functional, "has_torch_function", lambda _: lambda _args: False):
            return function(*args, **kwargs)

    return transparent_function


def _guarding_check(check: Callable[..., None]) -> Callable[..., None]:
    """The condition of a `torch._check` becomes a guard: another call may fail it."""

    def guarding_check(error_type: Any, cond: Any, message: Any) -> None:
        check(error_type, bool(cond) if _recording_tracer(cond) is not None else cond, message)

    return guarding_check
