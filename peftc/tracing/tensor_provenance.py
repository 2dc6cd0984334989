"""Tensors that a region's code makes without its arguments: constants, and what is computed from parameters alone.

Python runs such code on plain tensors. What made them is remembered, so that nodes can be written for it once one of them
meets a traced value.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from peftc.tracing.proxy import contains_proxy


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call: `kind` and `target` as those of a graph's node. `after`: the last node there was when it was made."""

    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    after: fx.Node | None = None


class Recorder(Protocol):
    """What the tape asks of a tracer."""

    recording: bool
    graph: fx.Graph

    def pause(self) -> AbstractContextManager[None]: ...
    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any: ...
    def knows(self, tensor: torch.Tensor) -> bool: ...
    def made_node(self, made: RecordedCall) -> Any: ...


@dataclass
class Tape:
    """What made each tensor, by its identity, and what changed it in place; tensors are kept alive with it."""

    made: dict[int, list[RecordedCall]] = field(default_factory=dict[int, list[RecordedCall]])
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    parts: dict[int, tuple[RecordedCall, int]] = field(default_factory=dict[int, tuple[RecordedCall, int]])

    def remember(self, result: Any, made: RecordedCall) -> None:
        if isinstance(result, torch.Tensor):
            self.made.setdefault(id(result), []).append(made)
            self.kept.append(result)
        elif isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                handed_on = (
                    id(part) in self.made or id(part) in self.parts
                )  # `broadcast_tensors` gives what it is given
                if isinstance(part, torch.Tensor) and not handed_on:
                    self.parts[id(part)] = (made, i)
                    self.kept.append(part)


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall | None:
    """A call as a node would have it; None for a question that makes no tensor."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return RecordedCall("call_function", getattr, (args[0], func.__self__.__name__), {})
    if name in ("__set__", "__delete__"):
        return None
    if name in ("__getitem__", "__setitem__"):
        return RecordedCall(
            "call_function", operator.getitem if name == "__getitem__" else operator.setitem, args, kwargs
        )
    if is_tensor_method_or_property(func):
        return RecordedCall("call_method", name, args, kwargs)
    return RecordedCall("call_function", func, args, kwargs)


class Remembering(TorchFunctionMode):
    """Remembers, while the trace is live, every call that no traced value takes part in; any other becomes a node.

    `known(tensor)`: whether a node stands for it already; then a change of it is written down at once.
    """

    def __init__(self, tape: Tape, tracer: Recorder) -> None:
        super().__init__()
        self.tape, self.tracer = tape, tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = called(func, args, kwargs) if self.tracer.recording else None
        if made is None:
            return func(*args, **kwargs)
        if contains_proxy((made.args, made.kwargs)):
            return self.tracer.record(made.kind, made.target, made.args, made.kwargs)
        made = replace(made, after=next(reversed(self.tracer.graph.nodes)))
        with self.tracer.pause():  # what torch's own code does is no part of the region
            result = func(*args, **kwargs)
        changed = args[0] if made.target is operator.setitem else result
        if isinstance(changed, torch.Tensor) and id(changed) in self.tape.made and not changes(made):
            return result  # as it was: `x.float()` of what is float32
        if not isinstance(changed, torch.Tensor) or not self.tracer.knows(changed):
            self.tape.remember(changed, made)
        elif changes(made):
            self.tracer.made_node(made)
        return result


def changes(made: RecordedCall) -> bool:
    """Whether a call changes its first argument in place."""
    name = str(made.target)
    return made.target is operator.setitem or (name.endswith("_") and not name.endswith("__"))
