"""The first tensor in arguments and results, and the path to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def first_tensor(value: Any) -> tuple[tuple[Any, ...], torch.Tensor] | None:
    """The first tensor in arguments or results, and its path; floating tensors come first."""
    first = None
    for path, leaf in _leaves(value, ()):
        if isinstance(leaf, torch.Tensor):
            if leaf.is_floating_point():
                return path, leaf
            first = first or (path, leaf)
    return first


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, (tuple, list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def input_path(arguments: dict[str, Any] | None) -> tuple[Any, ...]:
    """The path to the first tensor among arguments; () if they do not fit."""
    first = None if arguments is None else first_tensor(arguments)
    return () if first is None else first[0]
