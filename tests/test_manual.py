"""The page of forms and recipes says what the registry and `specs/` say."""

from pathlib import Path

from peftc import resources
from peftc.forms import FORMS
from peftc.manual import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "forms.md"


def test_the_page_is_made_anew() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs` and read what has changed"


def test_everything_is_on_it() -> None:
    text = page()
    for name in (*FORMS, *resources.recipes()):
        assert f"### `{name}`\n" in text
    assert all(f"| `{param.name}` |" in text for form in FORMS.values() for param in form.params)
