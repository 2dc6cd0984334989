"""Every diagnostic code has one explanation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import peftc
from peftc.cli import main
from peftc.diagnostics.codes import CODES, sections

PACKAGE = Path(peftc.__file__).parent


def test_every_code_that_is_raised_is_explained() -> None:
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    raised = {code for text in texts for code in re.findall(r'"(P\d{3})"', text)}
    assert raised - set(CODES) == set()


def test_every_code_has_one_section_in_the_file_of_its_hundred() -> None:
    files = {path.name[:2]: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("diagnostics/*/P*.md"))}
    headings = {prefix: re.findall(r"^## (P\d{3})", text, re.MULTILINE) for prefix, text in files.items()}
    assert all(codes == sorted(set(codes)) for codes in headings.values())
    assert all(code[:2] == prefix for prefix, codes in headings.items() for code in codes)
    assert [code for codes in headings.values() for code in codes] == [code for code, _ in sections()]


@pytest.mark.parametrize("code", sorted(CODES))
def test_an_explanation_says_something(code: str) -> None:
    info = CODES[code]
    assert re.fullmatch(r"P\d{3}", code)
    assert info.title
    assert not info.title.endswith(".")
    assert len(info.explanation) > 60


def test_an_unexpected_error_is_reported_as_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> int:
        raise KeyError("kv")

    monkeypatch.delenv("PEFTC_TRACEBACK", raising=False)
    monkeypatch.setattr("peftc.cli.explain_command.run_explain", broken)
    assert main.main(["explain", "P001"]) == 2
    assert capsys.readouterr().err.startswith("error[P900]: this is a bug in peftc: KeyError: 'kv'\n")
    monkeypatch.setenv("PEFTC_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main.main(["explain", "P001"])
