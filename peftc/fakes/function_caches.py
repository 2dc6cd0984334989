"""Functions of a model's code that remember their results (`functools.lru_cache`).

A mask that is remembered for its sizes, dtype and device would have no data after a run without
data, for all models of the process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Generator
from typing import Any

from torch import nn

from peftc.concurrency.interrupts import shielded
from peftc.modules.walk import outline

_LIBRARIES = ("torch", "peftc", "builtins")
_WRAPPER = type(functools.lru_cache(len))
_lock = threading.Lock()
_users: Counter[tuple[int, str]] = Counter()  # of the function itself, by file and name
_wrappers: dict[tuple[int, str], Any] = {}


def global_variables(*roots: nn.Module) -> list[dict[str, Any]]:
    """Those of the files that define the classes of modules and of those in them."""
    classes = {type(module) for root in roots for _, module in outline(root)}
    names = {cls.__module__ for one in classes for cls in one.__mro__}
    return [vars(sys.modules[n]) for n in names if n in sys.modules and n.partition(".")[0] not in _LIBRARIES]


@shielded
def no_function_caches(root: nn.Module) -> Generator[None]:
    """Inside, functions that the files of a model's classes name remember nothing, and have no
    results from outside.
    """
    # Seen in: no transformers model, but the decay masks of yet-another-retnet
    files = {id(file): file for file in global_variables(root)}
    with _lock:
        for number, file in files.items():
            for name in [name for name, value in file.items() if type(value) is _WRAPPER]:
                _wrappers[number, name] = file[name]
                file[name] = file[name].__wrapped__
        own = [place for place in _wrappers if place[0] in files]
        _users.update(own)
    try:
        yield
    finally:
        with _lock:
            _users.subtract(own)
            for place in [place for place in own if not _users[place]]:
                files[place[0]][place[1]] = _wrappers.pop(place)
                del _users[place]
