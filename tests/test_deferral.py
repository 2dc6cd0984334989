"""SIGINT during deferred and shielded blocks, with other signal handlers installed."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from peftc.concurrency.interrupts import INTERRUPTS, Deferral, shielded


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """A process started in the background by a shell has no SIGINT handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert (INTERRUPTS.deferrals, INTERRUPTS.shields, INTERRUPTS.pending) == (0, 0, False)
    signal.signal(signal.SIGINT, before)


def test_a_deferred_interrupt_is_raised_once_at_the_end_of_the_outermost_block() -> None:
    steps: list[str] = []

    def run() -> None:
        with Deferral():
            with Deferral() as inner:
                interrupt()
                with inner.interruptible():
                    steps.append("allowed, but not by the outer block")
            steps.append("inner block ended")
            interrupt()
            steps.append("second signal")
        steps.append("never")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert steps == ["allowed, but not by the outer block", "inner block ended", "second signal"]


def test_an_interruptible_block_is_interrupted_at_once() -> None:
    steps: list[str] = []

    def run() -> None:
        with Deferral() as deferral:
            try:
                with deferral.interruptible():
                    interrupt()
                    steps.append("never")
            finally:
                interrupt()
                steps.append("deferred again")

    def late() -> None:
        with Deferral() as deferral:
            interrupt()
            with deferral.interruptible():
                steps.append("never")

    for action in (run, late):
        with pytest.raises(KeyboardInterrupt):
            action()
    assert steps == ["deferred again"]


def test_an_error_of_the_block_is_not_lost() -> None:
    def run() -> None:
        with Deferral():
            interrupt()
            raise ValueError

    with pytest.raises(KeyboardInterrupt) as raised:
        run()
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_are_not_interrupted() -> None:
    states: list[Any] = []

    def work() -> None:
        with Deferral() as deferral, deferral.interruptible(), plain():
            states.append((deferral.counted, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [(False, signal.default_int_handler)]


@shielded
def plain() -> Generator[None]:
    yield


@shielded
def block(steps: list[str]) -> Generator[None]:
    steps.append("open")
    try:
        yield
    finally:
        interrupt()
        steps.append("closed")


def test_the_exit_of_a_shielded_block_is_not_interrupted() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), block(steps):
        steps.append("inside")
    assert steps == ["open", "inside", "closed"]
    steps.clear()
    with pytest.raises(KeyboardInterrupt), block(steps), block(steps):
        interrupt()
    assert steps == ["open", "open", "closed", "closed"]


def test_a_handler_that_is_set_inside_stays() -> None:
    calls: list[int] = []
    with Deferral():
        signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    interrupt()
    assert calls == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_the_handler_of_an_event_loop_is_called() -> None:
    """asyncio cancels the main task instead of raising an exception in arbitrary code."""
    steps: list[str] = []

    async def main() -> None:
        try:
            with Deferral():
                interrupt()
                steps.append("deferred")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert steps == ["deferred", "cancelled"]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Deferral() as deferral:
        assert not deferral.counted
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
