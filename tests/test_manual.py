"""`docs/forms.md` agrees with the form registry and with `specs/`."""

from pathlib import Path

import pytest

import peftc
from peftc.filesystem import resources
from peftc.forms import FORMS
from tests import zoo
from tools.forms_page import EXAMPLES, costs_of, folds_of, page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "forms.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs` and read what has changed"


def test_every_form_and_recipe_is_on_the_page() -> None:
    text = page()
    for name in (*FORMS, *resources.recipes()):
        assert f"### `{name}`\n" in text
    assert all(f"| `{param.name}` |" in text for form in FORMS.values() for param in form.params)


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_equations_on_the_page_have_plans(text: str) -> None:
    assert peftc.plan(f"peft 1\n{text}\n", zoo.build("bert-classifier")).edits


def test_costs_and_folding_on_the_page_are_those_of_plans() -> None:
    assert costs_of(FORMS["lora"]) == "with `r=8`, `[…, 768]` to `[…, 768]`: 12,288 trained and stored for each site"
    assert folds_of(FORMS["adapter"]) == "no: its activation relu is not linear; yes with `act=none`"
    assert folds_of(FORMS["magnitude"]) == "yes, it is a change of the weight"
    plan = peftc.plan("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=8) }\n", "bert-base-uncased")
    assert plan.totals.trained == 12 * 12_288
