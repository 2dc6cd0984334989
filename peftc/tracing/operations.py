"""Targets of nodes: leaves that are not traced into, and markers of control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.jit._builtins import _find_builtin  # pyright: ignore
from transformers.modeling_utils import AttentionInterface

_OWNERS: tuple[Any, ...] = (torch, torch._C._nn, torch._C._linalg, torch._C._fft)  # pyright: ignore
DIRECT = "direct"  # in the meta of a module's call: code calls its `forward`, past its hooks


def attention(module: Any, eager: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leaf: a call of the attention implementation, which is looked up when the leaf runs."""
    implementation: str = module.config._attn_implementation
    return AttentionInterface().get_interface(implementation, eager)(module, *args, **kwargs)


def autograd_function(*args: Any, function: type[torch.autograd.Function]) -> Any:
    """Leaf: an autograd function, whose gradient need not be that of its operations."""
    return function.apply(*args)


def script_function(*args: Any, function: torch.jit.ScriptFunction[..., Any], **kwargs: Any) -> Any:
    """Leaf: a function compiled by `torch.jit.script`, which has no Python code to trace."""
    return function(*args, **kwargs)


def model_function(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Leaf: a function of the model's code, which decides on what is known only while it runs."""
    return function(*args, **kwargs)


def python_target(target: Any, args: Sequence[Any]) -> tuple[str, Any]:
    """The kind and target of a node that calls an operator of PyTorch's dispatcher, such as
    `torch.ops.aten.add.Tensor`, as Python code calls it: by the function that is bound to the
    operator, else by the method. An operator without both stays.
    """
    # Seen in: no transformers model, but code that is copied from exported graphs
    packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target  # pyright: ignore
    if not isinstance(packet, torch._ops.OpOverloadPacket) or not args:  # pyright: ignore
        return "call_function", target
    name, operator = packet.__name__, str(packet).replace(".", "::")
    functions = (getattr(owner, name, None) for owner in _OWNERS)
    function = next((f for f in functions if f is not None and _find_builtin(f) == operator), None)
    if function is not None:
        return "call_function", function
    is_method = str(packet) == f"aten.{name}" and callable(getattr(torch.Tensor, name, None))
    return ("call_method", name) if is_method else ("call_function", target)


def branch(condition: Any, outcome: bool) -> None:
    """Marker: Python branches on tensor values, and the trace follows `outcome`."""


def enter_context(manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Marker: `with manager(*args, **kwargs):` begins."""
    context = manager(*args, **kwargs)
    context.__enter__()
    return context


def exit_context(context: Any) -> None:
    """Marker: the `with` block of `context` ends."""
    context.__exit__(None, None, None)


def segment(segments: Sequence[Any]) -> Any:
    """Marker: the variable of a `for` loop over `segments`."""
    return segments[0]


def collect(value: Any) -> list[Any]:
    """Marker: the list to which each iteration of a loop appends `value`."""
    return [value]


def end_loop(first: Any) -> None:
    """Marker: the loop whose first node is `first` ends."""


def new_version(value: Any, *_writers: Any) -> Any:
    """Marker: a tensor after `_writers` have changed its memory; nothing is printed."""
    return value
