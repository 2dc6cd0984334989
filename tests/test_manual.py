"""The generated pages of docs/ agree with the form registry, `specs/` and the docstrings."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest

import peftc
from peftc.equations.table import FORMS
from peftc.filesystem import resources
from peftc.semantics.form_facts import costs_of, folds_of
from tools import forms_page, python_api_page
from tools.forms_page import page
from tools.python_api_page import ERRORS, FUNCTIONS, RESULTS, attributes_of, comments_of, docstring

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.parametrize(("name", "tool"), [("forms.md", forms_page), ("python-api.md", python_api_page)])
def test_a_generated_page_is_made_anew(name: str, tool: ModuleType) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == tool.page(), "run `make docs` and read what has changed"


def test_every_form_and_recipe_is_on_the_page() -> None:
    text = page()
    for name in (*FORMS, *resources.recipes()):
        assert f"### `{name}`\n" in text
    assert all(f"| `{param.name}` |" in text for form in FORMS.values() for param in form.arguments)


def test_costs_and_folding_on_the_page_are_those_of_plans() -> None:
    assert costs_of(FORMS["lora"]) == "with `r=8`, `[…, 768]` to `[…, 768]`: 12,288 trained and stored for each site"
    assert (
        folds_of(FORMS["adapter"])
        == "no: `act(down @ z + down_bias)` is not linear with `act=relu`; yes with `act=none`"
    )
    assert folds_of(FORMS["magnitude"]) == "yes, it is a change of the weight"
    plan = peftc.plan("peft 1\nedit e at layer[*].attn.q { h += lora(x, r=8) }\n", "bert-base-uncased")
    assert plan.totals.trained == 12 * 12_288


def test_every_public_name_is_on_the_page() -> None:
    functions = [name for names in FUNCTIONS.values() for name in names]
    assert sorted([*functions, *ERRORS]) == sorted(peftc.__all__)


@pytest.mark.parametrize("name", [name for names in FUNCTIONS.values() for name in names])
def test_a_public_docstring_has_every_argument_and_the_errors(name: str) -> None:
    function = getattr(peftc, name)
    doc = docstring(function)
    assert doc.text
    if not inspect.isclass(function):
        assert list(doc.entries("Args")) == list(inspect.signature(function).parameters)
        assert "Raises" in doc.sections


@pytest.mark.parametrize("cls", [cls for classes in RESULTS.values() for cls in classes], ids=lambda cls: cls.__name__)
def test_a_public_class_has_every_attribute(cls: type) -> None:
    described = comments_of(cls) | docstring(cls).entries("Attributes")
    assert docstring(cls).text
    assert [name for name in attributes_of(cls) if name not in described] == []
