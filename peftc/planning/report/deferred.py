"""A value that is computed when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Deferred(Generic[T]):
    """Copies and pickles have the value."""

    make: Callable[[], T]

    @cached_property
    def value(self) -> T:
        return self.make()

    def __reduce__(self) -> Any:
        return (computed, (self.value,))


def computed(value: T) -> Deferred[T]:
    """One whose value is known."""
    return Deferred(lambda: value)
