"""Deferred SIGINT: an interrupt waits while a model changes, so that no change is partial.

A change is prepared first, which may fail or be interrupted, and then written inside a `Deferral`.
A failure there is undone inside another. Temporary patches are `shielded`: they are always removed.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import wraps
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Handler = Callable[[int, FrameType | None], Any]
SIGINT = int(signal.SIGINT)
# The functions of C under those of `signal`, which raise and catch an error to find out that a
# handler is no constant: in each block, for as long as all else in it takes.
_get_handler: Callable[[int], Any] = _signal.getsignal
_set_handler: Callable[[int, Any], Any] = _signal.signal


class Interrupts:
    """The SIGINT handler during a change or a patch. It calls the previous one, now or later."""

    def __init__(self) -> None:
        # Open blocks that defer signals, or whose exit must not be interrupted. Only of the main
        # thread, in which Python runs handlers.
        self.deferrals = self.shields = 0
        self.pending = False
        self.handler: Handler | None = None

    def install(self) -> bool:
        """Installs this handler. False if this thread cannot be interrupted."""
        if threading.current_thread() is not threading.main_thread():
            return False
        handler = _get_handler(SIGINT)
        if not callable(handler):  # the signal is ignored, or ends the process
            return False
        if handler != self.handle:
            self.handler = handler
            _set_handler(SIGINT, self.handle)
        return True

    def settle(self) -> None:
        """If no block is open, restores the previous handler, and calls it for a pending signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.restore()
        if self.pending and not self.deferrals and self.handler is not None:
            self.pending = False
            self.handler(signal.SIGINT, None)

    def restore(self) -> None:
        idle = not self.deferrals and not self.shields
        if idle and _get_handler(SIGINT) == self.handle:  # not replaced by others
            _set_handler(SIGINT, self.handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        running = frame
        while running is not None and running.f_code is not Shielded.__exit__.__code__:
            running = running.f_back
        if self.deferrals or running is not None:  # a shielded block exits: from its first instruction on
            self.pending = True
        elif self.handler is not None:
            self.restore()
            self.handler(number, frame)


INTERRUPTS = Interrupts()


class Deferral:
    """A context manager that defers SIGINT to the end of the outermost such block."""

    def __init__(self) -> None:
        self.counted = False
        self.depth = 0  # the number of enclosing blocks

    def __enter__(self) -> Deferral:
        if INTERRUPTS.install():
            self.depth = INTERRUPTS.deferrals
            INTERRUPTS.deferrals += 1
            self.counted = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.counted:
            self.counted = False
            INTERRUPTS.deferrals = self.depth
            INTERRUPTS.settle()

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Inside, SIGINT is not deferred by this block. For long steps that can be undone."""
        if not self.counted or self.depth:
            yield
            return
        try:
            INTERRUPTS.deferrals = 0
            if INTERRUPTS.pending:
                INTERRUPTS.settle()
            yield
        finally:
            INTERRUPTS.deferrals = 1
            INTERRUPTS.install()  # a signal may have restored the previous handler


class Shielded(ABC, Generic[T]):
    """A context manager that no SIGINT leaves half-entered: `open` and `close` run to their end."""

    def __init__(self) -> None:
        self.counted: list[bool] = []  # for each open block, whether the main thread opened it

    @abstractmethod
    def open(self) -> T: ...

    @abstractmethod
    def close(self, *error: Any) -> bool | None: ...

    def __enter__(self) -> T:
        is_open = False
        try:
            with Deferral() as deferral:
                value = self.open()
                INTERRUPTS.shields += deferral.counted
                self.counted.append(deferral.counted)
                is_open = True
            return value
        except BaseException as error:
            if is_open:
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.close(*error)
        finally:
            INTERRUPTS.shields -= self.counted.pop()
            INTERRUPTS.settle()


class _ShieldedGenerator(Shielded[T], ContextDecorator):
    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        super().__init__()
        self.make = make
        self.managers: list[AbstractContextManager[T]] = []

    def _recreate_cm(self) -> _ShieldedGenerator[T]:
        return _ShieldedGenerator(self.make)

    def open(self) -> T:
        manager = self.make()
        value = manager.__enter__()
        self.managers.append(manager)
        return value

    def close(self, *error: Any) -> bool | None:
        return self.managers.pop().__exit__(*error)


def shielded(function: Callable[P, Generator[T]]) -> Callable[P, _ShieldedGenerator[T]]:
    """As `contextlib.contextmanager`, for patches of shared objects, which are always removed."""
    manager = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _ShieldedGenerator[T]:
        return _ShieldedGenerator(lambda: manager(*args, **kwargs))

    return make
