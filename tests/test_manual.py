"""The page of forms and recipes says what the registry and `specs/` say."""

from pathlib import Path

import pytest

import peftc
from peftc.filesystem import resources
from peftc.forms import FORMS
from tests import zoo
from tools.forms_page import EXAMPLES, costs_of, folds_of, page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "forms.md"


def test_the_page_is_made_anew() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs` and read what has changed"


def test_everything_is_on_it() -> None:
    text = page()
    for name in (*FORMS, *resources.recipes()):
        assert f"### `{name}`\n" in text
    assert all(f"| `{param.name}` |" in text for form in FORMS.values() for param in form.params)


@pytest.mark.parametrize("text", EXAMPLES)
def test_its_equations_are_plans(text: str) -> None:
    assert peftc.plan(f"peft 1\n{text}\n", zoo.build("bert-classifier")).edits


def test_what_it_says_of_a_form_is_what_a_plan_says() -> None:
    assert costs_of(FORMS["lora"]) == "with `r=8`, `[…, 768]` to `[…, 768]`: 12,288 trained and stored for each site"
    assert folds_of(FORMS["adapter"]) == "no: its activation relu is not linear; yes with `act=none`"
    assert folds_of(FORMS["magnitude"]) == "yes, it is a change of the weight"
    plan = peftc.plan("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=8) }\n", "bert-base-uncased")
    assert plan.totals.trained == 12 * 12_288
