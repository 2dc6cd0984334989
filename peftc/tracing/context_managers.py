"""`with` blocks that change what operations inside do: autocast, no_grad, enable_grad, set_grad_enabled.

The graph holds a block as the nodes `enter_context` and `exit_context` around those of its body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import fx

from peftc.tracing.errors import TraceError
from peftc.tracing.operations import enter_context, exit_context
from peftc.tracing.tracer_base import OpenContext, current_tracer

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
def patch_attribute(owner: object, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    """Inside, `owner.name` is `wrap(owner.name)`."""
    is_own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def patch_context_managers() -> Generator[None]:
    """Inside, the current tracer records blocks, and queries of the state that blocks change."""
    with contextlib.ExitStack() as patches:
        for manager in MANAGERS:
            patches.enter_context(patch_attribute(manager, "__init__", partial(_recording_init, manager)))
            patches.enter_context(patch_attribute(manager, "__enter__", partial(_recording_enter, manager)))
            patches.enter_context(patch_attribute(manager, "__exit__", _recording_exit))
        patches.enter_context(patch_attribute(torch.inference_mode, "__enter__", _rejecting_enter))
        for query in (*GRADIENT_QUERIES, *AUTOCAST_QUERIES):
            patches.enter_context(patch_attribute(torch, query, partial(_recording_query, query)))
        yield


def _recording_init(manager: Any, init: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        tracer = current_tracer()
        if tracer is None:
            return init(self, *args, **kwargs)
        with tracer.pause():
            init(self, *args, **kwargs)
        self.__dict__[_ARGUMENTS] = (args, kwargs)
        if manager is torch.set_grad_enabled:  # has its effect already here, without a `with`
            self.__dict__[_CALL] = tracer.record_node(manager, args, kwargs)
        return None

    return __init__


def _recording_enter(manager: Any, enter: Any) -> Any:
    def __enter__(self: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return enter(self)
        with tracer.pause():
            result = enter(self)
        args, kwargs = _constructor_arguments(self)
        if (call := self.__dict__.pop(_CALL, None)) is not None:
            tracer.graph.erase_node(call)
        node = tracer.record_node(enter_context, (manager, *args), kwargs)
        tracer.open_contexts.append(OpenContext(self, node))
        return result

    return __enter__


def _recording_exit(leave: Any) -> Any:
    def __exit__(self: Any, *error: Any) -> Any:
        tracer = current_tracer()
        if tracer is None:
            return leave(self, *error)
        with tracer.pause():
            result = leave(self, *error)
        if tracer.open_contexts and tracer.open_contexts[-1].manager is self:
            tracer.record_node(exit_context, (tracer.open_contexts.pop().node,))
        return result

    return __exit__


def _rejecting_enter(enter: Any) -> Any:
    def __enter__(self: Any) -> Any:
        if current_tracer() is not None:
            raise TraceError(f"a graph cannot hold a block of `{type(self).__name__}`")
        return enter(self)

    return __enter__


def _recording_query(name: str, query: Any) -> Any:
    def recording_query(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        value = query(*args, **kwargs)
        if tracer is not None and not any(_determines(context.node, name) for context in tracer.open_contexts):
            tracer.global_state[name, (*args, *kwargs.values())] = value
        return value

    return recording_query


def _constructor_arguments(manager: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As the trace has recorded them; of a manager from before the trace, read from its attributes."""
    if _ARGUMENTS in manager.__dict__:
        return manager.__dict__[_ARGUMENTS]
    if isinstance(manager, torch.autocast):
        return (manager.device,), {"dtype": manager.fast_dtype, "enabled": manager._enabled}  # pyright: ignore
    return ((manager.mode,), {}) if isinstance(manager, torch.set_grad_enabled) else ((), {})


def _determines(node: fx.Node, query: str) -> bool:
    return is_gradient_context(node) == (query in GRADIENT_QUERIES)
