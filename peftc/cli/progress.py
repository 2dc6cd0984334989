"""What is going on: a line on a terminal for what takes more than a second, and `--verbose`."""

import sys
import threading
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from peftc.diagnostics.activity import listening
from peftc.diagnostics.diagnostic import printable
from peftc.diagnostics.render import is_terminal

DELAY = 1.0  # seconds before a line appears


class ProgressLine:
    """A line on stderr with the innermost activity, from the first second on, gone at the end.

    A listener of activities. Rich, which draws, is imported when the second is over.
    """

    def __init__(self, delay: float = DELAY) -> None:
        self._delay = delay
        self._activities: list[str] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._status: Any = None

    def begin(self, text: str) -> None:
        with self._lock:
            self._activities.append(text)
            if self._timer is None:
                self._timer = threading.Timer(self._delay, self._show)
                self._timer.daemon = True
                self._timer.start()
            self._update()

    def end(self, text: str, seconds: float) -> None:
        with self._lock:
            self._activities.pop()
            self._update()
            if not self._activities:
                self._stop()

    def note(self, text: str) -> None:
        pass

    def _show(self) -> None:
        console = import_module("rich.console").Console(stderr=True, highlight=False)
        with self._lock:
            if self._activities and self._status is None:
                self._status = console.status(self._text())
                self._status.start()

    def _update(self) -> None:
        if self._status is not None and self._activities:
            self._status.update(self._text())

    def _text(self) -> Any:
        return import_module("rich.text").Text(f"{printable(self._activities[-1])} …")  # no markup: names are data

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._status is not None:
            self._status.stop()
            self._status = None


class Log:
    """A line on stderr for each activity, with its time, and once for each note. A listener."""

    def __init__(self) -> None:
        self._notes: set[str] = set()

    def begin(self, text: str) -> None:
        pass

    def end(self, text: str, seconds: float) -> None:
        self._print(f"{text}: {seconds:.2f} s")

    def note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            self._print(text)

    def _print(self, text: str) -> None:
        print(f"peftc: {printable(text)}", file=sys.stderr, flush=True)


def progress_of(args: Namespace) -> AbstractContextManager[None]:
    """What a command shows of its work: all with --verbose, nothing with --quiet or in a pipe."""
    if getattr(args, "verbose", False):
        return listening(Log())
    if getattr(args, "quiet", False) or not is_terminal(sys.stderr):
        return nullcontext()
    return listening(ProgressLine())
