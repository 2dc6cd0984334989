"""Layers that are like one that has run already do not run: what that one showed is said of them too.

A sample forward then costs the same at any depth. Layers are alike where their structure and what they are called with
agree, shapes included, and where the first of them kept to its own modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.tracing.module_calls import bind_arguments


class Seen(Protocol):
    """What of an observation a layer's run adds to, by dotted name."""

    @property
    def order(self) -> list[str]: ...
    @property
    def calls(self) -> dict[str, int]: ...
    @property
    def inputs(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def outputs(self) -> dict[str, tuple[int, ...]]: ...
    @property
    def entries(self) -> dict[str, tuple[Any, ...]]: ...
    @property
    def results(self) -> dict[str, tuple[Any, ...]]: ...


@dataclass
class Run:
    """One layer's run: its name, what it returned, and how often it called each of its modules."""

    name: str
    result: Any
    calls: dict[str, int] = field(default_factory=dict[str, int])


class Repeats:
    """The layers of one sample forward."""

    def __init__(self, names: Mapping[int, str], seen: Seen, structure: Callable[[nn.Module], str]) -> None:
        self.names, self.seen, self.structure = names, seen, structure
        self.known = frozenset(names.values())
        self.runs: dict[str, Run] = {}

    def forward(self, layer: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """A forward of `layer` that runs where no other has shown what it does."""
        name = self.names[id(layer)]
        structure = self.structure(layer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = bind_arguments(type(layer).forward, layer, args, kwargs)
            key = f"{structure} {shapes(arguments)}"
            if key in self.runs and self.repeat(self.runs[key], name):
                return self.runs[key].result
            before = Counter(self.seen.calls)
            result = run(*args, **kwargs)
            self.runs.setdefault(key, Run(name, result, dict(Counter(self.seen.calls) - before)))
            return result

        return forward

    def repeat(self, run: Run, name: str) -> bool:
        """Says of a layer what was seen of another; False where that cannot be said."""
        own = {n: name + n[len(run.name) :] for n in run.calls if n.startswith(run.name + ".")}
        if len(own) < len(run.calls) or not self.known.issuperset(own.values()):
            return False
        seen = self.seen
        for first, mine in own.items():
            if mine not in seen.calls:
                seen.order.append(mine)
            seen.calls[mine] = seen.calls.get(mine, 0) + run.calls[first]
            for facts in (seen.inputs, seen.outputs, seen.entries, seen.results):
                if first in facts:
                    facts.setdefault(mine, facts[first])
        return True


@shielded
def repeated(layers: Iterable[nn.Module], repeats: Repeats) -> Generator[None]:
    """Inside the block, each of `layers` runs only where it has to."""
    layers = list(layers)
    before = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = repeats.forward(layer, layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


def shapes(value: Any) -> str:
    """What code can see of arguments, but for the values of tensors."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}={shapes(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(shapes, value)) + ")"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"{type(value).__name__}@{id(value)}"
