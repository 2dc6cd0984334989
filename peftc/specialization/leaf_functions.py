"""Functions of a model's code that a graph calls as a whole.

Their code takes a decision on a value that is known only while it runs, such as a loop over tokens
that a cache has added to. A graph cannot hold that code, but can hold the call.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, TracebackType
from typing import Any

from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.tracing.in_place import leaves
from peftc.tracing.operations import model_function
from peftc.tracing.patches import patching_lock
from peftc.tracing.proxy import contains_proxy, is_proxy
from peftc.tracing.tracer import RegionTracer
from peftc.tracing.tracer_base import TracerBase, intercept

_BOUNDARIES: set[CodeType] = {f.__code__ for f in (RegionTracer.enter, RegionTracer.trace_region)}


@dataclass(frozen=True)
class LeafFunction:
    """A function by the module whose code calls it, and the name that it has there."""

    module: str
    name: str

    @cached_property
    def names(self) -> dict[str, Any]:
        return vars(sys.modules[self.module])


def running_frames() -> list[FrameType]:
    """The frames of the caller of this function, the outermost first."""
    frames: list[FrameType] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def frames_of(error: BaseException) -> list[FrameType]:
    """The frames in which an error was raised, the outermost first."""
    frames: list[FrameType] = []
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def innermost_function(frames: Sequence[FrameType]) -> LeafFunction | None:
    """The innermost function that the code of the module that is running calls by a global name."""
    for i in range(len(frames) - 1, 0, -1):
        caller, code = frames[i - 1], frames[i].f_code
        if code in _BOUNDARIES:
            return None
        for name in caller.f_code.co_names:
            value = caller.f_globals.get(name)
            if isinstance(value, FunctionType) and value.__code__ is code and _can_be_leaf(value):
                module = str(caller.f_globals.get("__name__"))
                is_importable = vars(sys.modules.get(module, nn)).get(name) is value
                return LeafFunction(module, name) if is_importable else None
    return None


def _can_be_leaf(function: FunctionType) -> bool:
    """Whether a function is the model's, and runs to its end when it is called."""
    module = function.__module__ or ""
    is_model_code = module.partition(".")[0] not in ("torch", "peftc", "builtins")
    plain = inspect.unwrap(function)
    is_generator = inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain)
    return is_model_code and not is_generator and not _writes_globals(plain)


def _writes_globals(function: FunctionType) -> bool:
    """Whether a function may write what other code reads: a global name or object."""
    operations = {instruction.opname for instruction in dis.get_instructions(function)}
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    shared = (*named, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    has_shared = any(isinstance(value, (dict, list, set)) for value in shared)
    return "STORE_GLOBAL" in operations or (has_shared and not operations.isdisjoint({"STORE_SUBSCR", "STORE_ATTR"}))


def _takes_data(arguments: Any) -> bool:
    """Whether a call is of data with a proxy, and not of modules or functions that may hold any."""
    values = list(leaves(arguments))
    return contains_proxy(arguments) and not any(
        isinstance(v, nn.Module) or (callable(v) and not _is_plain(v)) for v in values if not is_proxy(v)
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, BuiltinFunctionType | type) or (
        isinstance(value, FunctionType) and value.__closure__ is None
    )


def _record(tracer: TracerBase, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return tracer.record("call_function", model_function, (function, *args), kwargs)


@shielded
def leaf_functions(functions: Collection[LeafFunction]) -> Generator[None]:
    """Inside, a trace records calls of these functions in place of their code."""
    wrap = intercept(_record, _takes_data)
    with patching_lock:
        originals = [(function, function.names[function.name]) for function in functions]
        try:
            for function, original in originals:
                function.names[function.name] = wrap(original)
            yield
        finally:
            for function, original in originals:
                function.names[function.name] = original
