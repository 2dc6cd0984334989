"""Global variables of a model's code: a run without data leaves nothing there.

A mask that code remembers for its sizes, dtype and device, in a function (`functools.lru_cache`), a
global variable, a class, or a collection in one of these, would have no data for all later calls of
all models of the process.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.concurrency.interrupts import shielded
from peftc.fakes.data_answers import tensors_in
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
def unchanged_globals(
    root: nn.Module,
    contains_proxy: Callable[[Any], bool] = lambda _: False,
    note_left: Callable[[Any, str, Any], None] = lambda *_: None,
) -> Generator[None]:
    """For runs without data. Inside the block, the files of a model's classes call functions past
    their `lru_cache`. After it, variables of these files, of their classes, functions and objects,
    and collections in them are restored where code has put tensors without data or proxies.
    `note_left`: called for each that has a proxy.
    """
    # Seen in: no transformers model, but the decay masks of yet-another-retnet
    files = {id(file): file for file in global_variables(root)}
    variables = [(owner, dict(vars(owner))) for owner in _owners(files.values())]
    own = (values for _, values in variables)
    tables = [(table, table.copy()) for table in _collections([*files.values(), *own])]
    tables += [(file, file.copy()) for file in files.values()]
    places = _unwrap(files)
    left: list[tuple[Any, str, Any]] = []

    def is_new(owner: Any, name: object, value: Any, before: Any) -> bool:
        if value is before:
            return False
        if contains_proxy(value):
            left.append((owner, str(name), value))
            return True
        return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(value))

    try:
        yield
    finally:
        _wrap(files, places)
        for table, before in tables:
            _restore(table, before, is_new)
        for owner, before in variables:
            for name in [n for n, value in vars(owner).items() if is_new(owner, n, value, before.get(n))]:
                if name in before:
                    setattr(owner, name, before[name])
                else:
                    delattr(owner, name)
    for one in left:
        note_left(*one)


def _owners(files: Iterable[dict[str, Any]]) -> list[Any]:
    """The classes and functions that files define, and their global objects."""
    values = ((file.get("__name__"), value) for file in files for name, value in file.items() if name[:2] != "__")
    return [value for name, value in values if _is_defined(value, name) or _is_object(value)]


def _is_defined(value: Any, file: Any) -> bool:
    return isinstance(value, (type, FunctionType)) and value.__module__ == file


def _is_object(value: Any) -> bool:
    """Whether a value is an object of a class that no library defines."""
    of_library = str(type(value).__module__).partition(".")[0] in (*_LIBRARIES, *sys.stdlib_module_names)
    return not of_library and isinstance(getattr(value, "__dict__", None), dict)


def _collections(tables: Iterable[dict[str, Any]]) -> Iterator[Any]:
    return (v for table in tables for name, v in table.items() if type(v) in (dict, list) and name[:2] != "__")


def _restore(table: Any, before: Any, is_new: Callable[[Any, object, Any, Any], bool]) -> None:
    """Gives a dictionary or a list its entries again, if new ones came in."""
    if isinstance(table, list):
        if any(is_new(table, i, value, None) for i, value in enumerate(table[len(before) :], len(before))):
            table[:] = before
        return
    for key in [key for key, value in table.items() if is_new(table, key, value, before.get(key))]:
        if key in before:
            table[key] = before[key]
        else:
            del table[key]


def _unwrap(files: dict[int, dict[str, Any]]) -> list[tuple[int, str]]:
    """Replaces each function with an `lru_cache` by the function in it. Returns: their places."""
    with _lock:
        for number, file in files.items():
            for name in [name for name, value in file.items() if type(value) is _WRAPPER]:
                _wrappers[number, name] = file[name]
                file[name] = file[name].__wrapped__
        places = [place for place in _wrappers if place[0] in files]
        _users.update(places)
    return places


def _wrap(files: dict[int, dict[str, Any]], places: list[tuple[int, str]]) -> None:
    with _lock:
        _users.subtract(places)
        for place in [place for place in places if not _users[place]]:
            files[place[0]][place[1]] = _wrappers.pop(place)
            del _users[place]
