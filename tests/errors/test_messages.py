"""What peftc says of mistakes that people make: one spec a mistake, all messages in `golden/`.

The name of a spec begins with its topic. A spec about a model names one of tests/zoo.py in its
first line. Read a changed golden file as a newcomer would, before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import peftc
from peftc.addressing.sites import SiteTable
from peftc.checking.run import Checker
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.render import render_text
from peftc.planning.on_table import plan_on_table
from peftc.semantics.expand import expand
from peftc.semantics.files import decode
from peftc.syntax.parser import parse_text
from tests import zoo

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
MISTAKES = sorted(FOLDER.glob("*.peft"))
TOPICS = sorted({path.stem.split("-")[0] for path in MISTAKES})
MODEL = "# model: "
LEAST = 200  # mistakes


@cache
def site_table(model: str) -> SiteTable:
    return peftc.sites(zoo.build(model))


def diagnose(path: Path) -> tuple[Diagnostic, ...]:
    """All that `peftc check` and a plan on the model say."""
    try:
        text = decode(path.read_bytes(), path.name)
    except PeftcError as error:
        return error.diagnostics
    alone = Checker().alone(text, path.name)
    if any(one.severity == "error" for one in alone) or not text.startswith(MODEL):
        return alone
    model = text.splitlines()[0].removeprefix(MODEL)
    try:
        result = plan_on_table(site_table(model), expand(parse_text(text, path.name)))
    except PeftcError as error:
        return (*alone, *error.diagnostics)
    return (*alone, *result.failed_expectations, *result.warnings)


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= LEAST


@pytest.mark.parametrize("topic", TOPICS)
def test_messages(topic: str, golden: Callable[[str, str], None]) -> None:
    sections = [
        f"=== {path.stem}\n{render_text(diagnose(path))}" for path in MISTAKES if path.stem.split("-")[0] == topic
    ]
    golden(f"{topic}.txt", "\n".join(sections).replace(f"{ROOT}/", "").replace(str(ROOT), "FOLDER"))


# Mistakes that people make one at a time.
ONE_MISTAKE = {
    **dict.fromkeys(("syntax-range-three-dots", "syntax-three-dots"), "P017"),
    **dict.fromkeys(("syntax-comment-slashes", "syntax-comment-block", "syntax-comment-behind"), "P013"),
    **dict.fromkeys(("syntax-optional-conditional", "syntax-choice-in-form", "syntax-choice-argument"), "P023"),
    **dict.fromkeys(("syntax-letters-of-a-word", "syntax-letter-fullwidth", "syntax-quote-typographic"), "P003"),
    **dict.fromkeys(("syntax-quote-single", "syntax-quote-backtick", "header-colon"), "P003"),
    **dict.fromkeys(("syntax-selector-word-or", "syntax-selector-list", "syntax-star-step"), "P016"),
    **dict.fromkeys(("syntax-power", "syntax-power-number", "syntax-percent-word"), "P023"),
    **dict.fromkeys(("name-prefix-alone", "name-prefix-without-length"), "P303"),
    **dict.fromkeys(("form-branch-of-one-line", "form-branch", "form-comparison-of-values"), "P023"),
    **dict.fromkeys(("name-state-thrown-away",), "P320"),
    **dict.fromkeys(("model-expect-identity-prefix", "model-expect-identity-factor"), "P304"),
}


@pytest.mark.parametrize(("stem", "code"), ONE_MISTAKE.items())
def test_one_mistake_is_one_message(stem: str, code: str) -> None:
    assert [one.code for one in diagnose(FOLDER / f"{stem}.peft")] == [code]


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_each_message_has_more_than_its_first_line(path: Path) -> None:
    diagnostics = diagnose(path)
    assert diagnostics
    for diagnostic in diagnostics:
        assert diagnostic.source is not None
        assert diagnostic.help or diagnostic.notes or diagnostic.label, diagnostic.message
