"""SIGINT waits while a model changes, so that it finds the model changed or as it was, and nothing in between.

A change is prepared, which may fail and be interrupted, and written inside of a `Deferral`; what fails there is undone inside of another.
What patches something for a while is `shielded`: it is always taken back.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import wraps
from types import CodeType, FrameType
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
Handler = Callable[[int, FrameType | None], Any]


class Interrupts:
    """The handler of SIGINT while something changes or is patched: it calls the one of before, at once or later.

    `deferrals`: how many blocks are open in which it waits; `shields`: how many are open whose end must not be interrupted. Python runs
    handlers in the main thread alone, so what other threads do is not counted.
    """

    def __init__(self) -> None:
        self.deferrals = self.shields = 0
        self.pending = False
        self.handler: Handler | None = None
        self.codes = set[CodeType]()  # of functions in which it waits from their first instruction on

    def install(self) -> bool:
        """Whether this thread can be interrupted; then this handler is in the place of the other one."""
        if threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # the signal is ignored, or ends the process
            return False
        if handler != self.note:
            self.handler = handler
            signal.signal(signal.SIGINT, self.note)
        return True

    def settle(self) -> None:
        """Puts the other handler back where nothing is open, and calls it where a signal has waited."""
        if threading.current_thread() is not threading.main_thread():
            return
        self.restore()
        if self.pending and not self.deferrals and self.handler is not None:
            self.pending = False
            self.handler(signal.SIGINT, None)

    def restore(self) -> None:
        idle = not self.deferrals and not self.shields
        if idle and signal.getsignal(signal.SIGINT) == self.note:  # nobody has put another one in its place
            signal.signal(signal.SIGINT, self.handler)

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.deferrals or self.is_closing(frame):
            self.pending = True
        elif self.handler is not None:
            self.restore()
            self.handler(number, frame)

    def is_closing(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self.codes:
                return True
            frame = frame.f_back
        return False

    def covers(self, function: Any) -> Any:
        """A decorator: SIGINT waits while this function runs and a shield is open."""
        self.codes.add(function.__code__)
        return function


INTERRUPTS = Interrupts()


class Deferral:
    """`with`: inside, a SIGINT waits; it is raised where the outermost block ends. Blocks may stand in each other."""

    def __init__(self) -> None:
        self.counted = False
        self.outer = 0  # how many blocks this one stands in

    def __enter__(self) -> Deferral:
        if INTERRUPTS.install():
            self.outer = INTERRUPTS.deferrals
            INTERRUPTS.deferrals += 1
            self.counted = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.counted:
            self.counted = False
            INTERRUPTS.deferrals = self.outer
            INTERRUPTS.settle()

    @contextmanager
    def interruptible(self) -> Generator[None]:
        """Inside of this block a SIGINT is raised at once, where no other deferral is around: for long steps that can be undone."""
        if not self.counted or self.outer:
            yield
            return
        try:
            INTERRUPTS.deferrals = 0
            if INTERRUPTS.pending:
                INTERRUPTS.settle()
            yield
        finally:
            INTERRUPTS.deferrals = 1
            INTERRUPTS.install()  # a signal that came has put the other handler back


class Shielded(ABC, Generic[T]):
    """A context manager that is either entered or not, whenever a SIGINT comes: `open` and `close` end once they have begun."""

    def __init__(self) -> None:
        self.counted: list[bool] = []  # whether each open block was opened in the main thread

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

    @INTERRUPTS.covers
    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self.close(*error)
        finally:
            INTERRUPTS.shields -= self.counted.pop()
            INTERRUPTS.settle()


class _Managed(Shielded[T], ContextDecorator):
    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        super().__init__()
        self.make = make
        self.managers: list[AbstractContextManager[T]] = []

    def _recreate_cm(self) -> _Managed[T]:
        return _Managed(self.make)

    def open(self) -> T:
        manager = self.make()
        value = manager.__enter__()
        self.managers.append(manager)
        return value

    def close(self, *error: Any) -> bool | None:
        return self.managers.pop().__exit__(*error)


def shielded(function: Callable[P, Generator[T]]) -> Callable[P, _Managed[T]]:
    """`contextlib.contextmanager` for blocks that patch what others see: it is always taken back."""
    manager = contextmanager(function)

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _Managed[T]:
        return _Managed(lambda: manager(*args, **kwargs))

    return make
