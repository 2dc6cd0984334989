"""The outcome of one input: a result, a diagnostic, or a failure (a traceback, a hang, a loss)."""

from __future__ import annotations

import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from peftc import PeftcError

SECONDS = 30.0  # of CPU for one input; nearly all take a hundredth of it


class Hang(BaseException):
    """An input takes more than `SECONDS`. Nothing in peftc catches this exception."""


@dataclass
class Tally:
    """Counts of outcomes, and the data to reproduce each failure."""

    counts: Counter[str] = field(default_factory=Counter[str])
    codes: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])

    def run(self, name: str, action: Callable[[], object]) -> bool:
        """Whether `action` ends in a result, or in a diagnostic that is no bug of peftc."""
        self.counts["run"] += 1
        try:
            _in_time(action)
        except PeftcError as error:
            codes = {diagnostic.code for diagnostic in error.diagnostics}
            self.codes.update(codes)
            if codes and max(codes) < "P9":
                self.counts["refused"] += 1
                return False
            self._fail("tracebacks", name, error)
        except Hang as error:
            self._fail("hangs", name, error)
        except AssertionError as error:
            self._fail("losses", name, error)
        except Exception as error:
            self._fail("tracebacks", name, error)
        else:
            self.counts["accepted"] += 1
            return True
        return False

    def _fail(self, kind: str, name: str, error: BaseException) -> None:
        self.counts[kind] += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        self.failures.append(f"{kind}: {name}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"[:1000])


def _in_time(action: Callable[[], object]) -> None:
    def late(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGVTALRM, late)
    slow = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 20 * SECONDS)  # a blocked call uses no CPU time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            action()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        signal.signal(signal.SIGALRM, slow)
