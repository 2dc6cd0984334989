"""Every code that is raised is explained, and a code means one thing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import peftc
from peftc.cli.main import main
from peftc.diagnostics.codes import CODES
from peftc.diagnostics.codes_names import NAMES
from peftc.diagnostics.codes_plan import PLAN
from peftc.diagnostics.codes_rewrite import REWRITE
from peftc.diagnostics.codes_syntax import SYNTAX
from peftc.diagnostics.codes_verification import VERIFICATION
from peftc.diagnostics.codes_weights import WEIGHTS

PACKAGE = Path(peftc.__file__).parent


def test_every_code_that_is_raised_is_explained() -> None:
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if not path.name.startswith("code"))
    used = {code for text in texts for code in re.findall(r'"(P\d{3})"', text)}
    assert used - set(CODES) == set()


def test_no_code_is_in_two_tables() -> None:
    counts = Counter(code for table in (SYNTAX, NAMES, PLAN, REWRITE, WEIGHTS, VERIFICATION) for code in table)
    assert [code for code, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_explanation_says_something(code: str) -> None:
    info = CODES[code]
    assert re.fullmatch(r"P\d{3}", code)
    assert info.title
    assert not info.title.endswith(".")
    assert len(info.explanation) > 60


def test_a_bug_is_told_as_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(args: object) -> int:
        raise KeyError("kv")

    monkeypatch.delenv("PEFTC_TRACEBACK", raising=False)
    monkeypatch.setattr(main, "run_explain", broken)
    assert main.main(["explain", "P001"]) == 2
    assert capsys.readouterr().err.startswith("error[P900]: this is a bug in peftc: KeyError: 'kv'\n")
    monkeypatch.setenv("PEFTC_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main.main(["explain", "P001"])
