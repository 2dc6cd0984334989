"""Work that takes time, for whoever shows it: the progress line of a command, or `--verbose`."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class Listener(Protocol):
    """What is called when work begins and ends, and for facts about it."""

    def begin(self, text: str) -> None: ...

    def end(self, text: str, seconds: float) -> None: ...

    def note(self, text: str) -> None: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Calls a listener for all activities inside."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def activity(text: str) -> Generator[None]:
    """Work that may take long: `tracing facebook/bart-large`."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    start = time.perf_counter()
    listener.begin(text)
    try:
        yield
    finally:
        listener.end(text, time.perf_counter() - start)


def note(text: str) -> None:
    """A fact about the work: `the sites of facebook/bart-large are from the cache`."""
    if (listener := _LISTENER.get()) is not None:
        listener.note(text)
