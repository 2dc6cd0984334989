"""`with` blocks of traced code that change what operations inside do: autocast, no_grad, enable_grad, set_grad_enabled.

A block is kept as two nodes, `entered` and `left`, around the nodes of what runs inside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from peftc.tracing.code_positions import Origin

if TYPE_CHECKING:
    from peftc.tracing.tracer import RegionTracer

Current = Callable[[], "RegionTracer | None"]
BLOCKS: tuple[Any, ...] = (torch.autocast, torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
GRADIENTS = ("is_grad_enabled",)
AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled")


def enter_context(block: Any, *args: Any, **kwargs: Any) -> Any:
    """Enters a block; printed as `with block(…):`."""
    made = block(*args, **kwargs)
    made.__enter__()
    return made


def exit_context(block: Any) -> None:
    """Ends a block."""
    block.__exit__(None, None, None)


@dataclass(frozen=True)
class Block:
    """One that is open: the object, and the node at which it was entered."""

    held: Any
    node: fx.Node


class TraceError(Exception):
    """The region cannot be traced; the message says at which call of which child."""


class NoneAccess(TraceError):
    """The region's code looked at a part of a result that is None, as at one that is not; `origin` tells which part."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(f"a part of a result that is None was used: {origin[1]}")
        self.origin = origin


def is_gradient_context(node: fx.Node) -> bool:
    """Whether a block that begins at `node` changes what has gradients, and not what is computed."""
    return node.args[0] is not torch.autocast


def answers(node: fx.Node, question: str) -> bool:
    """Whether a block decides how torch answers a question inside of it."""
    return is_gradient_context(node) == (question in GRADIENTS)


@contextlib.contextmanager
def watched_blocks(current: Current) -> Generator[None]:
    """Inside, the live tracer is told of every block and of every question that a block could answer otherwise."""
    with contextlib.ExitStack() as patches:
        for kind in BLOCKS:
            for name, wrap in (("__init__", _made), ("__enter__", _entering), ("__exit__", _leaving)):
                patches.enter_context(patched(kind, name, wrap(kind, current)))
        patches.enter_context(patched(torch.inference_mode, "__enter__", _refusing(current)))
        for name in (*GRADIENTS, *AUTOCAST):
            patches.enter_context(patched(torch, name, _asking(name, current)))
        yield


@contextlib.contextmanager
def patched(owner: object, name: str, wrap: Callable[[Any], Any]) -> Generator[None]:
    """`owner.name` is `wrap(owner.name)` inside the block."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _made(kind: Any, current: Current) -> Callable[[Any], Any]:
    """`set_grad_enabled` acts when it is made, whether a block of it is entered or not."""

    def wrap(make: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            tracer = current()
            with tracer.pause() if tracer is not None else contextlib.nullcontext():
                make(self, *args, **kwargs)
            if tracer is None:
                return
            self.__dict__["given"] = (args, kwargs)
            if kind is torch.set_grad_enabled:
                self.__dict__["call"] = tracer.record_node(kind, args, kwargs)

        return __init__

    return wrap


def _entering(kind: Any, current: Current) -> Callable[[Any], Any]:
    def wrap(enter: Any) -> Any:
        def __enter__(self: Any) -> Any:
            tracer = current()
            if tracer is None:
                return enter(self)
            with tracer.pause():
                result = enter(self)
            args, kwargs = given(self)
            if (call := self.__dict__.pop("call", None)) is not None:
                tracer.graph.erase_node(call)
            tracer.open_contexts.append(Block(self, tracer.record_node(enter_context, (kind, *args), kwargs)))
            return result

        return __enter__

    return wrap


def _leaving(kind: Any, current: Current) -> Callable[[Any], Any]:
    def wrap(leave: Any) -> Any:
        def __exit__(self: Any, *reason: Any) -> Any:
            tracer = current()
            if tracer is None:
                return leave(self, *reason)
            with tracer.pause():
                result = leave(self, *reason)
            if tracer.open_contexts and tracer.open_contexts[-1].held is self:
                tracer.record_node(exit_context, (tracer.open_contexts.pop().node,))
            return result

        return __exit__

    return wrap


def given(block: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block was made with; one that was made before the trace tells it."""
    known = block.__dict__.get("given")
    if known is not None:
        return known
    if isinstance(block, torch.autocast):
        return (block.device,), {"dtype": block.fast_dtype, "enabled": block._enabled}  # pyright: ignore
    return ((block.mode,), {}) if isinstance(block, torch.set_grad_enabled) else ((), {})


def decorated(function: Any) -> bool:
    """Whether one of the wrappers of a function is such a block."""
    while hasattr(function, "__wrapped__"):
        if {"ctx_factory", "autocast_instance"}.intersection(function.__code__.co_freevars):
            return True
        function = function.__wrapped__
    return False


def _refusing(current: Current) -> Callable[[Any], Any]:
    def wrap(enter: Any) -> Any:
        def __enter__(self: Any) -> Any:
            if current() is not None:
                raise TraceError(f"{type(self).__name__} blocks cannot be kept in a graph")
            return enter(self)

        return __enter__

    return wrap


def _asking(name: str, current: Current) -> Callable[[Any], Any]:
    def wrap(ask: Any) -> Any:
        def asked(*args: Any, **kwargs: Any) -> Any:
            tracer = current()
            value = ask(*args, **kwargs)
            if tracer is not None and not any(answers(b.node, name) for b in tracer.open_contexts):
                tracer.global_state[name, (*args, *kwargs.values())] = value
            return value

        return asked

    return wrap
