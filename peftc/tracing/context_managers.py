"""`with` blocks that change what operations do: autocast and the gradient modes.

The graph holds a block as the nodes `enter_context` and `exit_context` around those of its body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import partial
from typing import Any

import torch
from torch import fx

from peftc.tracing.operations import enter_context, exit_context
from peftc.tracing.region_trace import TraceError
from peftc.tracing.tracer_base import OpenContext, TracerBase, intercept, patch_attribute

MANAGERS: tuple[Any, ...] = (torch.autocast, torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
GRADIENT_QUERIES = ("is_grad_enabled",)
AUTOCAST_QUERIES = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled")
_ARGUMENTS, _CALL = "_peftc_arguments", "_peftc_call"  # attributes of context managers that a trace makes


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


@contextlib.contextmanager
def patch_context_managers() -> Generator[None]:
    """Inside, the current tracer records blocks, and queries of the state that blocks change."""
    with contextlib.ExitStack() as patches:
        for manager in MANAGERS:
            for name, record in (("__init__", _record_init), ("__enter__", _record_enter), ("__exit__", _record_exit)):
                patches.enter_context(patch_attribute(manager, name, intercept(partial(record, manager))))
        patches.enter_context(patch_attribute(torch.inference_mode, "__enter__", intercept(_reject_enter)))
        for query in (*GRADIENT_QUERIES, *AUTOCAST_QUERIES):
            patches.enter_context(patch_attribute(torch, query, intercept(partial(_record_query, query))))
        yield


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
    tracer.open_contexts.append(OpenContext(self, tracer.record_node(enter_context, (manager, *args), kwargs)))
    return result


def _record_exit(manager: Any, tracer: TracerBase, leave: Any, self: Any, *error: Any) -> Any:
    with tracer.pause():
        result = leave(self, *error)
    if tracer.open_contexts and tracer.open_contexts[-1].manager is self:
        tracer.record_node(exit_context, (tracer.open_contexts.pop().node,))
    return result


def _reject_enter(tracer: TracerBase, enter: Any, self: Any) -> Any:
    raise TraceError(f"a graph cannot hold a block of `{type(self).__name__}`")


def _record_query(name: str, tracer: TracerBase, query: Any, /, *args: Any, **kwargs: Any) -> Any:
    value = query(*args, **kwargs)
    if not any(is_gradient_context(c.node) == (name in GRADIENT_QUERIES) for c in tracer.open_contexts):
        tracer.global_state[name, (*args, *kwargs.values())] = value
    return value


def _constructor_arguments(manager: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As recorded; of a manager from before the trace, read from its attributes."""
    if _ARGUMENTS in manager.__dict__:
        return manager.__dict__[_ARGUMENTS]
    if isinstance(manager, torch.autocast):
        return (manager.device,), {"dtype": manager.fast_dtype, "enabled": manager._enabled}  # pyright: ignore
    return ((manager.mode,), {}) if isinstance(manager, torch.set_grad_enabled) else ((), {})
