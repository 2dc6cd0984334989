"""Tensors that modules keep in attributes between calls.

A trace leaves none of its own there. It runs without those in dictionaries, such as biases by
device, so that the code computes them anew. They may only depend on parameters: what an earlier
call has left of its own values no graph holds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.tracing.proxy import contains_proxy
from peftc.tracing.region_trace import TraceError

_TENSORS = ("_parameters", "_buffers")
_REGISTRIES = (*_TENSORS, "_modules")


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
def without_proxies(root: nn.Module, note_left: Callable[[nn.Module, str, Any], None]) -> Generator[None]:
    """Restores the attributes of modules in which the traced code has left proxies, and calls
    `note_left` for each.
    """
    # Seen in: Recurrent Gemma, whose recurrences keep their last state
    modules = list(root.modules())
    tables = [(module, table) for module in modules for table in (vars(module), *map(vars(module).get, _TENSORS))]
    before = [(module, table, dict(table)) for module, table in tables if table is not None]
    members = [(module, name, value) for module in modules for name, value in vars(module).items()]
    collections = [one for one in members if type(one[2]) in (list, dict) and one[1] not in _REGISTRIES]
    copies = [(*one, one[2].copy()) for one in collections]
    left: list[tuple[nn.Module, str, Any]] = []
    try:
        yield
    finally:
        for module, own, attributes in before:
            changed = [name for name, value in own.items() if value is not attributes.get(name)]
            for name in filter(lambda name, own=own: contains_proxy(own[name]), changed):
                left.append((module, name, own[name]))
                own[name] = attributes.get(name)
                if name not in attributes:
                    del own[name]
        for module, name, value, entries in copies:
            if contains_proxy(value):
                left.append((module, name, value.copy()))
                value.clear()
                (value.extend if type(value) is list else value.update)(entries)
    for one in left:
        note_left(*one)


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
