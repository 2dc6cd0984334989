"""Targets of nodes: leaves that are not traced into, and markers of control flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

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
