"""What a trace patches: modules, attention, functions of torch that reject proxies, `with` blocks.

The graph holds a block (autocast, a gradient mode) as nodes `enter_context` and `exit_context`.
"""

import builtins
import contextlib
import threading
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

import torch
from torch import fx, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch
from torch.autograd import forward_ad
from torch.autograd import functional as autograd_functional
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from transformers.modeling_utils import AttentionInterface

from peftc.concurrency.interrupts import shielded
from peftc.modules.function_parts import held_part
from peftc.modules.subclasses import subclass
from peftc.modules.torch_attributes import ATTRIBUTES
from peftc.tracing.in_place import leaves, version
from peftc.tracing.operations import attention, autograd_function, enter_context, exit_context, script_function
from peftc.tracing.proxy import concrete_values, contains_proxy, is_proxy
from peftc.tracing.region_trace import TraceError
from peftc.tracing.tensor_provenance import RecordedCall
from peftc.tracing.tracer_base import (
    TracerBase,
    check_transforms,
    current_tracer,
    intercept,
    patch_attribute,
    reject_transform,
)

FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "tensor", "linspace", "rand", "randn")
TAKE_SIZES = ("reshape", "broadcast_to", "tile", "narrow", "split")  # torch converts sizes in the arguments to numbers
REJECT_SIZES = ("expand", "new_zeros", "new_ones", "new_empty")  # methods that take no proxy as the first of sizes
CRASH = ("where",)  # ends the process when its second argument only looks like a tensor and the third is a number
PLAIN = frozenset({bool, int, float, str, tuple, list, type(None)})  # attributes that decisions may rest on
NO_STATE = ATTRIBUTES - {"training"}  # attributes of torch, not of a model
MANAGERS: tuple[Any, ...] = (torch.autocast, torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
GRADIENT_QUERIES = ("is_grad_enabled", "is_inference_mode_enabled")
OF_OBJECTS = ("is_tensor", "is_storage")  # queries of what they are given
STATES = (bool, int, float, str, torch.dtype)  # of torch, that a query returns
# Their C code takes proxies for tensors and ends the process, or they ask examples for gradients.
TRANSFORMS: tuple[tuple[Any, str], ...] = (
    (vmap, "_create_batched_inputs"),
    (eager_transforms, "_wrap_all_tensors"),
    (eager_transforms, "_wrap_all_tensors_to_functional"),
    (forward_ad, "make_dual"),
    (proxy_tensor._MakefxTracer, "trace"),  # pyright: ignore[reportPrivateUsage]
    (autograd_functional, "_as_tuple"),
)
SEEDS = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
FUNCTION_BASE: Any = torch.autograd.Function.__mro__[1]  # Function.apply calls the `apply` of this class
DTYPE: Any = torch.Tensor.dtype
_ARGUMENTS, _CALL = "_peftc_arguments", "_peftc_call"  # attributes of context managers that a trace makes
INSTRUMENTED = "_peftc_instrumented"  # of a class that reports to a tracer: the class of the model
patching_lock = threading.RLock()  # reentrant: a leaf that runs while examples are computed may be traced itself


def is_gradient_context(node: fx.Node) -> bool:
    """Whether the block that `node` enters changes what has gradients, and not what is computed."""
    return node.args[0] is not torch.autocast


def has_context_decorator(function: Any) -> bool:
    """Whether a function is decorated with one of the context managers."""
    while hasattr(function, "__wrapped__"):
        if {"ctx_factory", "autocast_instance"}.intersection(function.__code__.co_freevars):
            return True
        function = function.__wrapped__
    return False


def _record_init(manager: Any, tracer: TracerBase, init: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    with tracer.pause():
        init(self, *args, **kwargs)
    self.__dict__[_ARGUMENTS] = (args, kwargs)
    if manager is torch.set_grad_enabled:  # has its effect already here, without a `with`
        self.__dict__[_CALL] = tracer.record_node(manager, args, kwargs)


def _record_enter(manager: Any, tracer: TracerBase, enter: Any, self: Any) -> Any:
    with tracer.pause():
        result = enter(self)
    args, kwargs = _constructor_arguments(self)
    if (call := self.__dict__.pop(_CALL, None)) is not None:
        tracer.graph.erase_node(call)
    tracer.open_contexts.append((self, tracer.record_node(enter_context, (manager, *args), kwargs)))
    return result


def _record_exit(manager: Any, tracer: TracerBase, leave: Any, self: Any, *error: Any) -> Any:
    with tracer.pause():
        result = leave(self, *error)
    if tracer.open_contexts and tracer.open_contexts[-1][0] is self:
        tracer.record_node(exit_context, (tracer.open_contexts.pop()[1],))
    return result


def _reject_enter(tracer: TracerBase, enter: Any, self: Any) -> Any:
    raise TraceError(f"a graph cannot hold a block of `{type(self).__name__}`")


def _record_query(name: str, tracer: TracerBase, query: Any, /, *args: Any, **kwargs: Any) -> Any:
    value = query(*args, **kwargs)
    arguments = (*args, *kwargs.values())
    is_local = any(_decides(node, name) for _, node in tracer.open_contexts)
    if not is_local and isinstance(value, STATES) and all(type(argument) is str for argument in arguments):
        tracer.global_state[name, arguments] = value
    return value


def _decides(context: fx.Node, query: str) -> bool:
    """Whether the block that a node enters decides what a query returns."""
    return query in GRADIENT_QUERIES if is_gradient_context(context) else "autocast" in query


@cache
def queries() -> tuple[str, ...]:
    """The functions of torch that tell a state of it, such as `get_default_dtype`."""
    names = [name for name in dir(torch) if name.startswith(("is_", "are_", "get_")) and name not in SEEDS]
    of_values = (*dir(torch._C._VariableFunctions), *OF_OBJECTS)  # pyright: ignore
    return tuple(name for name in names if callable(getattr(torch, name)) and name not in of_values)


def _constructor_arguments(manager: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As recorded; of a manager from before the trace, read from its attributes."""
    if _ARGUMENTS in manager.__dict__:
        return manager.__dict__[_ARGUMENTS]
    if isinstance(manager, torch.autocast):
        return (manager.device,), {"dtype": manager.fast_dtype, "enabled": manager._enabled}  # pyright: ignore
    return ((manager.mode,), {}) if isinstance(manager, torch.set_grad_enabled) else ((), {})


def is_member(value: object, name: str) -> bool:
    """Whether an attribute is one of the object's own, or a value of its class: no method."""
    if name in object.__getattribute__(value, "__dict__"):
        return True
    owner = next((vars(cls) for cls in type(value).__mro__ if name in vars(cls)), None)
    return owner is not None and name[:2] != "__" and not hasattr(type(owner[name]), "__get__")


@cache
def instrument(cls: type) -> type:
    """A subclass that reports calls, and reads of attributes, to the current tracer."""
    parent: Any = cls

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return parent.__call__(self, *args, **kwargs)
        return tracer.call_module(self, parent.__call__, args, kwargs)

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or tracer.is_running(self):
            return parent.forward(self, *args, **kwargs)
        return tracer.call_module(self, parent.forward, args, kwargs, direct=True)

    forward.__wrapped__ = parent.forward  # pyright: ignore[reportFunctionMemberAccess]

    def __getattribute__(self: Any, name: str) -> Any:
        value = parent.__getattribute__(self, name)
        tracer = current_tracer()
        if tracer is None or name in NO_STATE or (type(value) not in PLAIN and not is_member(self, name)):
            return value
        return tracer.read_attribute(self, name, value)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        tracer = current_tracer()
        if tracer is not None:
            tracer.write_attribute(self, name, value)
        if tracer is not None and is_proxy(value) and (name in self._buffers or name in self._parameters):
            vars(self)[name] = value  # found before them, and taken out again: they hold tensors only
        else:
            parent.__setattr__(self, name, value)

    def __getattr__(self: Any, name: str) -> Any:
        tracer = current_tracer()
        try:
            value = parent.__getattr__(self, name)
        except AttributeError:
            if tracer is not None and name[:2] != "__":
                tracer.note_absence(self, name)
            raise
        if isinstance(value, torch.Tensor) and tracer is not None:
            tracer.read_tensor(self, name, value)
        return value

    members: dict[str, Any] = {f.__name__: f for f in (__call__, forward, __getattribute__, __getattr__, __setattr__)}
    return subclass(cls, members | {INSTRUMENTED: cls})


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
    """Inside, libraries record what neither proxies nor instrumented modules would see."""
    block = (("__init__", _record_init), ("__enter__", _record_enter), ("__exit__", _record_exit))
    patches: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (builtins, "callable", intercept(_is_callable)),
        (AttentionInterface, "get_interface", intercept(_record_interface)),
        *((torch, name, intercept(_record_function, contains_proxy)) for name in FACTORIES + TAKE_SIZES + CRASH),
        *((torch.Tensor, name, intercept(partial(_record_method, name), contains_proxy)) for name in REJECT_SIZES),
        (torch.Tensor, "data", _settable_data),
        (torch, "_check_with", intercept(_guard_check, contains_proxy)),
        (torch.jit.ScriptFunction, "__call__", intercept(_record_script_function, contains_proxy)),
        (FUNCTION_BASE, "apply", _recording_apply),
        (functorch, "unwrap_dead_wrappers", intercept(_without_wrappers, contains_proxy)),
        *((owner, name, intercept(reject_transform, contains_proxy)) for owner, name in TRANSFORMS),
        *((torch, name, intercept(_reject_seed)) for name in SEEDS),
        (checkpoint, "_checkpoint_without_reentrant_generator", intercept(_skip_checkpoint, contains_proxy)),
        (nn.functional, "multi_head_attention_forward", intercept(_trace_attention, contains_proxy)),
        *((manager, name, intercept(partial(record, manager))) for manager in MANAGERS for name, record in block),
        (torch.inference_mode, "__enter__", intercept(_reject_enter)),
        *((torch, name, intercept(partial(_record_query, name))) for name in queries()),
        *tracer.patches(),
    ]
    with patching_lock, contextlib.ExitStack() as stack:
        for owner, name, wrap in patches:
            stack.enter_context(patch_attribute(owner, name, wrap))
        stack.enter_context(tracer.activate())
        stack.enter_context(ProvenanceMode(tracer))
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
        if getattr(func, "__self__", None) is DTYPE and tracer.recording and id(args[0]) in tracer.tensor_names:
            tracer.read_dtype(args[0])
        if getattr(func, "__name__", "") == "__set__" and tracer.recording and id(args[0]) in tracer.tensor_names:
            tracer.write_member(args[0], func.__self__.__name__, args[1])
        call = RecordedCall.of(func, args, kwargs, tracer.graph) if tracer.recording else None
        if call is None:
            return func(*args, **kwargs)
        check_transforms()
        if contains_proxy((call.args, call.kwargs)):
            return tracer.record(call.kind, call.target, call.args, call.kwargs)
        tensors = [t for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        with tracer.pause():  # what torch's own code does is not part of the region
            versions_before = [version(t) for t in tensors]
            result = func(*args, **kwargs)
            written = [t for t, before in zip(tensors, versions_before, strict=True) if version(t) != before]
        tracer.provenance.record(call, result, written)
        return result


def _settable_data(original: Any) -> property:
    """`Tensor.data`, whose C code takes a proxy for a tensor and ends the process."""

    def set_data(tensor: torch.Tensor, value: Any) -> None:
        tracer = current_tracer()
        if tracer is None or not is_proxy(value):
            original.__set__(tensor, value)
        elif id(tensor) in tracer.tensor_names and concrete_values(value).shape == tensor.shape:
            tracer.write_member(tensor, "data", value)
        else:
            raise TraceError("its code gives a tensor the data of another one")

    return _Data(original.__get__, set_data)


class _Data(property):
    __name__ = "data"  # which those see that record a read of it


def _record_function(tracer: TracerBase, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return tracer.record("call_function", function, args, kwargs)


def _record_method(name: str, tracer: TracerBase, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    return tracer.record("call_method", name, args, kwargs)


def _is_callable(tracer: TracerBase, original: Any, value: Any, /) -> bool:
    """Proxies have a `__call__`, whatever they stand for."""
    return original(concrete_values(value))


def _record_interface(tracer: TracerBase, _: Any, registry: Any, attn_implementation: str, default: Any) -> Any:
    def call(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return tracer.record("call_function", attention, (module, default, query, key, value, *args), kwargs)

    return call


def _record_script_function(tracer: TracerBase, call: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    return tracer.record("call_function", script_function, args, {**kwargs, "function": function})


def _recording_apply(_: Any) -> Any:
    """Autograd functions become leaves: their C code would take proxies for tensors. Modules keep
    `apply` under names of their own, so what it calls is patched, and not itself.

    Seen in: mambapy (`pscan = PScan.apply`)
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or not contains_proxy((args, kwargs)):
            return super(FUNCTION_BASE, cls).apply(*args, **kwargs)  # pyright: ignore
        if cls is checkpoint.CheckpointFunction:
            function, _, *arguments = args
            return function(*arguments)
        functions = (a for a in args if callable(a) and not is_proxy(a) and not isinstance(a, nn.Module | torch.Tensor))
        if (part := next((p for f in functions if (p := held_part(f)) is not None), None)) is not None:  # of the copy
            holder = f"`{cls.__name__}` gets a function that holds a {type(part).__name__}"
            raise TraceError(f"{holder}, and the code of an autograd function is not traced")
        return tracer.record("call_function", autograd_function, args, {**kwargs, "function": cls})

    return classmethod(apply)


def _without_wrappers(tracer: TracerBase, unwrap: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`Function.apply` asks C code about each tensor; proxies are none."""
    return args


def _reject_seed(tracer: TracerBase, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    raise TraceError(f"its code calls `torch.{function.__name__}`, and a graph has no state of random numbers")


def _skip_checkpoint(tracer: TracerBase, generator: Any, /, *args: Any, **kwargs: Any) -> Generator[None]:
    """A checkpoint would save proxies for the backward pass as if they were tensors."""
    yield


def _trace_attention(tracer: TracerBase, function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """torch's own multi-head attention is written in Python: its code is traced."""
    with patch_attribute(nn.functional, "has_torch_function", lambda _: lambda _args: False):
        return function(*args, **kwargs)


def _guard_check(tracer: TracerBase, check: Any, error_type: Any, cond: Any, message: Any) -> None:
    """The condition of a `torch._check` becomes a guard: another call may fail it."""
    check(error_type, bool(cond), message)
