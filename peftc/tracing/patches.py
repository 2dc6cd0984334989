"""What a live trace watches: calls and attribute reads of modules, the attention registry, functions that make tensors."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import checkpoint
from transformers.modeling_utils import AttentionInterface

from peftc.concurrency.interrupts import shielded
from peftc.tracing.context_managers import patched, watched_blocks
from peftc.tracing.proxy import contains_proxy

if TYPE_CHECKING:
    from peftc.tracing.tracer import RegionTracer

_CREATES = ("arange", "zeros", "ones", "full", "empty", "eye", "tensor", "linspace", "rand", "randn")
_SIZED = ("reshape", "broadcast_to", "tile", "narrow", "split")  # torch makes plain numbers of sizes in their arguments
_CRASHES = ("where",)  # ends the process when its second argument only looks like a tensor and the third is a number
_active = threading.local()


def attention(module: Any, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The leaf that every attention call becomes; the implementation is looked up when it runs."""
    implementation: str = module.config._attn_implementation
    return AttentionInterface().get_interface(implementation, eager)(module, *args, **kwargs)


def autograd_function(*args: Any, function: type[torch.autograd.Function]) -> Any:
    """What an autograd function gives, whose own code is not entered: it may have another gradient than its operations."""
    return function.apply(*args)


def script_function(*args: Any, function: torch.jit.ScriptFunction[..., Any], **kwargs: Any) -> Any:
    """What a function compiled by `torch.jit.script` gives; there is no Python code to enter."""
    return function(*args, **kwargs)


def computed_by(tracer: RegionTracer, call: fx.Node) -> dict[tuple[str, str], Any]:
    """The fact which implementation computes an attention: only some give their weights. Of any other call, none."""
    if call.target is not attention or not isinstance(held := call.args[0], fx.Node):
        return {}
    owner = str(held.target).removeprefix("_self")
    with tracer.pause():
        config: Any = tracer.root.get_submodule(owner).config
        return {(f"{owner}.config".lstrip("."), "_attn_implementation"): str(config._attn_implementation)}


def getitem_root(node: fx.Node) -> fx.Node:
    """What a node is a part of, or a part of a part."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def branch(condition: Any, outcome: bool) -> None:
    """Marks where Python asked for a truth that only the values of tensors tell, and went on as if it were `outcome`."""


_spies: dict[type, type] = {}


def spy(cls: type) -> type:
    """A subclass of a module class that reports calls and attribute reads to the live tracer of this thread."""
    if cls in _spies:
        return _spies[cls]
    parent: Any = cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return parent.__call__(self, *args, **kwargs)
        return tracer.call(self, args, kwargs)

    def __getattribute__(self: Any, name: str) -> Any:
        value = parent.__getattribute__(self, name)
        if type(value) not in (bool, int, float):
            return value
        tracer = current_tracer()
        return value if tracer is None else tracer.read_attribute(self, name, value)

    members = {"__call__": __call__, "__getattribute__": __getattribute__, "__module__": cls.__module__}
    _spies[cls] = made = type(cls.__name__, (cls,), members)
    return made


@shielded
def spying(root: nn.Module, tracer: RegionTracer) -> Generator[None]:
    modules = [(m, type(m)) for m in root.modules()]
    try:
        for module, cls in modules:
            module.__class__ = spy(cls)
        yield
    finally:
        for module, cls in modules:
            module.__class__ = cls


def current_tracer() -> RegionTracer | None:
    tracer = getattr(_active, "tracer", None)
    return tracer if tracer is not None and tracer.recording else None


def is_tracing() -> bool:
    """Whether this thread traces a region, be it that it records or that it computes an example."""
    return getattr(_active, "tracer", None) is not None


_patching = threading.RLock()  # a leaf that runs while examples are computed may be traced itself


@shielded
def live(tracer: RegionTracer) -> Generator[None]:
    """Patches the seams that no subclass reaches: the attention registry, torch's functions that make or shape tensors,
    and the blocks that a graph would lose.
    """
    with _patching, contextlib.ExitStack() as patches:
        patches.enter_context(patched(AttentionInterface, "get_interface", _recording_attention))
        for name in _CREATES + _SIZED + _CRASHES:
            patches.enter_context(patched(torch, name, _recorded))
        patches.enter_context(patched(torch, "_check_with", _decided))
        patches.enter_context(watched_blocks(current_tracer))
        patches.enter_context(guarded_functions())
        patches.enter_context(patched(checkpoint, "_checkpoint_without_reentrant_generator", _entered_checkpoint))
        patches.enter_context(patched(nn.functional, "multi_head_attention_forward", _entered))
        outer = getattr(_active, "tracer", None)
        _active.tracer, tracer.recording = tracer, True
        try:
            yield
        finally:
            _active.tracer, tracer.recording = outer, False


@contextlib.contextmanager
def guarded_functions() -> Generator[None]:
    """Inside the block an autograd function or a scripted function of traced values becomes a leaf; their C code would take
    the values for tensors.
    """
    owner: Any = torch.autograd.Function
    compiled: Any = torch.jit.ScriptFunction
    before, call_compiled = vars(owner)["apply"], compiled.__call__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        now = current_tracer()
        if now is not None and contains_proxy((args, kwargs)):
            if cls is checkpoint.CheckpointFunction:
                function, _, *given = args
                return function(*given)
            return now.record("call_function", autograd_function, args, {**kwargs, "function": cls})
        return before.__func__(cls, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = current_tracer()
        if now is not None and contains_proxy((args, kwargs)):
            return now.record("call_function", script_function, args, {**kwargs, "function": self})
        return call_compiled(self, *args, **kwargs)

    owner.apply, compiled.__call__ = classmethod(apply), call
    try:
        yield
    finally:
        owner.apply, compiled.__call__ = before, call_compiled


def _entered_checkpoint(before: Callable[..., Any]) -> Callable[..., Any]:
    """What stands around the function of a checkpoint that is not reentrant: nothing, where the code of the function is traced. What
    keeps inputs for the backward pass would take traced values for tensors.
    """

    def around(*args: Any, **kwargs: Any) -> Generator[None]:
        if current_tracer() is None or not contains_proxy((args, kwargs)):
            yield from before(*args, **kwargs)
        else:
            yield

    return around


def _entered(function: Any) -> Any:
    """A function of torch that is written in Python, and whose own code is traced."""

    def enter(*args: Any, **kwargs: Any) -> Any:
        if current_tracer() is None or not contains_proxy((args, kwargs)):
            return function(*args, **kwargs)
        with patched(nn.functional, "has_torch_function", lambda _: lambda _given: False):
            return function(*args, **kwargs)

    return enter


def _decided(check: Callable[..., None]) -> Callable[..., None]:
    """What `torch._check` and its like are told is a decision: another call may fail the check."""

    def checked(error_type: Any, cond: Any, message: Any) -> None:
        check(error_type, bool(cond) if current_tracer() is not None and contains_proxy(cond) else cond, message)

    return checked


def _recording_attention(interface: Any) -> Any:
    def get_interface(self: Any, attn_implementation: str, default: Any) -> Any:
        now = current_tracer()
        if now is None:
            return interface(self, attn_implementation, default)

        def call(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
            return now.record("call_function", attention, (module, default, query, key, value, *rest), more)

        return call

    return get_interface


def _recorded(function: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> Any:
        now = current_tracer()
        if now is None or not contains_proxy((args, kwargs)):
            return function(*args, **kwargs)
        return now.record("call_function", function, args, kwargs)

    return create


def selects(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether a mask chooses entries of a tensor. How many there are only the mask tells; one will do for an example."""
    return target is operator.getitem and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
