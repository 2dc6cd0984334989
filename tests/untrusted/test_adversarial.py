"""The adversarial benchmark detects violations, and the README's figures are those of
its results.
"""

from __future__ import annotations

import time

import pytest

from benchmarks.adversarial import adapters, files, outcome, specs
from benchmarks.adversarial.outcome import Tally
from peftc import Diagnostic, PeftcError

BROKEN = ("tracebacks", "hangs", "losses")


def test_violations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "SECONDS", 0.2)
    tally = Tally()

    def fail(error: BaseException) -> None:
        raise error

    def spin() -> None:
        while True:
            pass

    assert tally.run("good", lambda: None)
    for error in (KeyError("a"), RecursionError(), PeftcError(Diagnostic("P900", "a bug")), AssertionError("changed")):
        assert not tally.run("bad", lambda error=error: fail(error))
    assert not tally.run("refused", lambda: fail(PeftcError(Diagnostic("P101", "no form"))))
    assert not tally.run("long", spin)
    assert not tally.run("asleep", lambda: time.sleep(60))
    assert {kind: tally.counts[kind] for kind in BROKEN} == {"tracebacks": 3, "hangs": 2, "losses": 1}
    assert tally.counts["accepted"] == tally.counts["refused"] == 1
    assert len(tally.failures) == 6


def test_a_short_run() -> None:
    tally = Tally()
    specs.run(40, 7, tally)
    assert tally.failures == []
    assert tally.counts["run"] == 40
    assert 0 < tally.counts["accepted"] < 40


def test_mutated_files() -> None:
    tally = Tally()
    files.run(40, 3, tally)
    assert tally.failures == []
    assert tally.counts["run"] == 2 * 3 * 40
    assert tally.counts["refused"] > 30
    assert tally.counts["accepted"] > 3 * 40  # all checks of the other files, and some mutations


def test_tampered_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    tally, every = Tally(), adapters.changes
    monkeypatch.setattr(adapters, "changes", lambda draw: list(every(draw))[::20])
    adapters.run(3, tally)
    assert tally.failures == []
    assert tally.counts["run"] > 20
    assert tally.counts["accepted"] >= 1  # the first one is unchanged
