"""Sequences whose items are made when someone asks for one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar, overload

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Subclasses say how many items there are without making them."""

    @abstractmethod
    def _make(self) -> Iterable[T]:
        """Makes all items."""

    @cached_property
    def _items(self) -> tuple[T, ...]:
        return tuple(self._make())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._items[index]
