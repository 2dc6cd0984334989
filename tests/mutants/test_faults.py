"""The tools of `make mutants`: a fault is one small change, and a probe records when its place is
executed.
"""

from __future__ import annotations

import ast
import builtins
import json
from pathlib import Path

import pytest

from tests.mutants import probes
from tests.mutants.faults import Fault, Finder, faults_of, sampled_faults
from tests.mutants.run import REASONS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''
from functools import cache

@cache
def halves(count, least=1):
    """A docstring."""
    if count < least:
        raise ValueError(count)
    return count // 2


class Box:
    size = 3

    def grow(self, by=2):
        self.note(by)
        self.size = self.size + by

    def note(self, by): pass
'''


def faults() -> list[Fault]:
    finder = Finder("source.py", SOURCE)
    finder.visit(ast.parse(SOURCE))
    return finder.faults


def reached(calls: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The `before` of every fault that some calls reach."""
    numbers = set[int]()
    monkeypatch.setattr(builtins, probes.NAME, numbers.add, raising=False)
    names: dict[str, object] = {}
    exec(probes.probed(SOURCE, list(enumerate(faults()))), names)
    assert not numbers, "importing calls nothing"
    exec(calls, names)
    return {faults()[number].before for number in numbers}


def test_places_of_all_kinds() -> None:
    assert {(f.before, f.after) for f in faults()} == {
        ("count < least", "not (count < least)"),
        ("<", "<="),
        ("raise ValueError(count)", "pass"),
        ("//", "*"),
        ("2", "(2 + 1)"),
        ("3", "(3 + 1)"),  # of a class
        ("self.note(by)", "pass"),
        ("+", "-"),
    }
    for fault in faults():
        ast.parse(fault.applied(SOURCE))


@pytest.mark.parametrize(
    ("calls", "befores"),
    [
        ("halves(4)", {"count < least", "<", "//", "2"}),
        ("try: halves(0)\nexcept ValueError: pass", {"count < least", "<", "raise ValueError(count)"}),
        ("Box().grow()", {"3", "self.note(by)", "+"}),
    ],
)
def test_a_probe_records_what_is_reached(calls: str, befores: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert reached(calls, monkeypatch) == befores


def test_a_sample_has_every_package_and_compiles() -> None:
    sample = sampled_faults(ROOT, 160, 1)
    packages = {path.parent.name for path in (ROOT / "peftc").glob("*/*.py")}
    assert len(sample) >= 150
    assert {fault.path.split("/")[1] for fault in sample if fault.path.count("/") > 1} == packages
    for fault in sample:
        text = (ROOT / fault.path).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(fault.applied(text))) != ast.dump(ast.parse(text)), fault.key


def test_a_sample_keeps_faults_that_still_exist() -> None:
    first = sampled_faults(ROOT, 160, 1)
    keys = [fault.key for fault in first]
    assert [fault.key for fault in sampled_faults(ROOT, 160, 2, keys)] == keys
    other = {fault.key for fault in sampled_faults(ROOT, 160, 2, keys[::2])}
    assert other > set(keys[::2])
    assert other != set(keys)


def test_reasons_are_of_existing_faults() -> None:
    assert set(json.loads(REASONS.read_text())) <= {fault.key for fault in faults_of(ROOT)}
