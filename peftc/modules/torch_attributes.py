"""The attributes that PyTorch gives to every module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=type[nn.Module])

ATTRIBUTES = frozenset(vars(nn.Module()))
# Those that hold parameters, buffers, children and hooks, with the class of each table.
TABLES: dict[str, Any] = {
    name: type(value) for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)
}
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


class _Table:
    """An attribute with a table of hooks, which a module makes when something asks for it."""

    def __init__(self, name: str, kind: type[Any]) -> None:
        self.name, self.kind = name, kind

    def __get__(self, module: object, owner: object = None) -> Any:
        return self if module is None else vars(module).setdefault(self.name, self.kind())


def with_lazy_tables(cls: M) -> M:
    """The class, whose modules may lack tables of hooks until something asks for them."""
    for name in TABLES.keys() - _REGISTRIES:
        setattr(cls, name, _Table(name, TABLES[name]))
    return cls


def copied_tables(cls: type[nn.Module]) -> list[tuple[str, Any]]:
    """The tables that a new module of a class needs at once, with their classes."""
    return [(name, kind) for name, kind in TABLES.items() if not isinstance(getattr(cls, name, None), _Table)]


def drop_empty_tables(module: nn.Module) -> None:
    """Leaves a module without the empty tables that its class makes at need, as copies of it are:
    `torch.compile` guards on which there are.
    """
    own = vars(module)
    for name in TABLES:
        if isinstance(getattr(type(module), name, None), _Table) and not own.get(name, True):
            del own[name]


def getter(names: Iterable[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that reads the values of some attributes, as a tuple."""
    names = tuple(names)
    return itemgetter(*names) if len(names) > 1 else lambda own: tuple([own[name] for name in names])
