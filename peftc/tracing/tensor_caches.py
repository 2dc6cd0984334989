"""Tensors that modules keep in attributes between calls.

A trace leaves none of its own there. It runs without those in dictionaries, such as biases by
device, so that the code computes them anew. They may only depend on parameters: what an earlier
call has left of its own values no graph holds.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.tracing.proxy import contains_proxy
from peftc.tracing.region_trace import TraceError

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _Cache(dict[Any, Any]):
    """A dictionary without its tensors. `asked`: the keys of these that code has asked for."""

    def __init__(self, entries: dict[Any, Any]) -> None:
        super().__init__({key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)})
        self.hidden = entries.keys() - self.keys()
        self.asked = set[Any]()

    def __contains__(self, key: object) -> bool:
        self._ask(key)
        return super().__contains__(key)

    def __missing__(self, key: Any) -> Any:
        self._ask(key)
        raise KeyError(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._ask(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        self.asked |= self.hidden
        return super().__iter__()

    def __len__(self) -> int:
        self.asked |= self.hidden
        return super().__len__()

    def _ask(self, key: object) -> None:
        if key in self.hidden:
            self.asked.add(key)

    def state(self) -> object | None:
        """A key whose tensor is not computed anew, or from arguments of the call."""
        return next((k for k in self.asked if not super(_Cache, self).__contains__(k) or contains_proxy(self[k])), None)


@shielded
def without_proxies(root: nn.Module) -> Generator[None]:
    """Restores the attributes of modules in which the traced code has left proxies."""
    # Seen in: Recurrent Gemma, whose recurrences keep their last state
    before = [(vars(module), dict(vars(module))) for module in root.modules()]
    members = [(name, value) for _, own in before for name, value in own.items() if type(value) in (list, dict)]
    copies = [(value, value.copy()) for name, value in members if name not in _REGISTRIES]
    try:
        yield
    finally:
        for own, attributes in before:
            changed = [name for name, value in own.items() if value is not attributes.get(name)]
            for name in filter(lambda name, own=own: contains_proxy(own[name]), changed):
                own[name] = attributes.get(name)
                if name not in attributes:
                    del own[name]
        for value, entries in copies:
            if contains_proxy(value):
                value.clear()
                (value.extend if type(value) is list else value.update)(entries)


@shielded
def without_cached_tensors(root: nn.Module) -> Generator[None]:
    """Inside, dictionaries in attributes of modules have no tensors. Raises: TraceError where these
    are a state of earlier calls.
    """
    # Seen in: no transformers model, but LeViT, EfficientFormer and TinyViT of timm
    originals = [
        (module, name, value)
        for module in root.modules()
        for name, value in vars(module).items()
        if type(value) is dict and name not in _REGISTRIES
        if any(isinstance(entry, torch.Tensor) for entry in value.values())
    ]
    caches = [(vars(module), name, _Cache(value)) for module, name, value in originals]
    try:
        for own, name, cache in caches:
            own[name] = cache
        yield
        for own, name, cache in caches:
            if own.get(name) is cache and cache.state() is not None:
                raise TraceError(f"`{name}` keeps tensors of earlier calls")
    finally:
        for module, name, value in originals:
            vars(module)[name] = value
