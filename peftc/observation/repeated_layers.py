"""Skips layers that repeat another: a sample forward costs the same at any depth.

A layer repeats another if their structures and arguments agree, shapes included, and if the first
called no modules but its own. Layers whose keys agree can share one traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.observation.sample_forward import ModuleCall, SampleForward
from peftc.tracing.module_calls import bind_arguments


def structure_key(module: nn.Module) -> str:
    """A text that two modules share exactly if their class trees and parameter shapes agree."""
    parts: list[str] = []
    for name, child in module.named_modules():
        shapes = ",".join(f"{n}{tuple(p.shape)}" for n, p in child.named_parameters(recurse=False))
        parts.append(f"{name}:{type(child).__qualname__}@{id(type(child))}[{shapes}]")  # classes may share a name
    return ";".join(parts)


def arguments_key(value: Any, exact: bool = False) -> str:
    """What Python code can see of arguments without the values of tensors. `exact`: with shapes,
    dtypes and the identity of objects; else ranks and classes.
    """
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}" if exact else f"{value.ndim}d"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}={arguments_key(v, exact)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(arguments_key(v, exact) for v in value) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__}@{id(value)}" if exact else type(value).__name__


@shielded
def skip_repeated(
    model: nn.Module,
    layers: Iterable[nn.Module],
    key: Callable[[nn.Module], str] = structure_key,
    record: SampleForward | None = None,
) -> Generator[None]:
    """Inside the block, each of `layers` runs only if it repeats no layer that has run.

    Args: `key`: the structure of a layer. `record`: gets the calls that a skipped layer would make.
    """
    forwards = [(layer, vars(layer).get("forward")) for layer in layers]
    repeats = _Repeats(model, key, record or SampleForward())
    try:
        for layer, _ in forwards:
            vars(layer)["forward"] = repeats.forward(layer, layer.forward)
        yield
    finally:
        for layer, forward in forwards:
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


@dataclass
class _Run:
    name: str
    result: Any
    counts: dict[str, int]  # of the calls of each module during the run


class _Repeats:
    """The layers that ran in one sample forward."""

    def __init__(self, model: nn.Module, key: Callable[[nn.Module], str], record: SampleForward) -> None:
        self.names = {id(m): n for n, m in model.named_modules()}
        self.key, self.record = key, record
        self.modules = frozenset(self.names.values())
        self.runs: dict[str, _Run] = {}

    def forward(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of `layer` that returns the result of a repeated layer, or calls `run`."""
        name, structure = self.names[id(layer)], self.key(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = f"{structure} {arguments_key(bind_arguments(type(layer).forward, layer, args, kwargs), exact=True)}"
            if key in self.runs and self.repeat(self.runs[key], name):
                return self.runs[key].result
            before = {n: call.count for n, call in self.record.calls.items()}
            result = run(*args, **kwargs)
            more = {n: call.count - before.get(n, 0) for n, call in self.record.calls.items()}
            self.runs.setdefault(key, _Run(name, result, {n: count for n, count in more.items() if count}))
            return result

        return forward

    def repeat(self, run: _Run, name: str) -> bool:
        """Records a run's calls for layer `name`; False if the run left its layer."""
        own = {n: name + n[len(run.name) :] for n in run.counts if n.startswith(f"{run.name}.")}
        if len(own) < len(run.counts) or not self.modules.issuperset(own.values()):
            return False
        for first, module in own.items():
            call = self.record.calls.setdefault(module, ModuleCall())
            call.count += run.counts[first]
            call.complete(self.record.calls[first])
        return True
