"""README.md opens with a picture of what it describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.readme_picture import FIGURES, pictures

ROOT = FIGURES.parent.parent


def test_the_picture_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name, svg in pictures().items():
        assert (FIGURES / name).read_text(encoding="utf-8") == svg, "run `python -m tools.readme_picture`"


def test_the_readme_opens_with_it() -> None:
    text = Path(ROOT / "README.md").read_text(encoding="utf-8")
    opening = text[: text.index("\n## ")]
    for name in ("mam-on-bart.svg", "mam-on-bart-small.svg"):
        assert f"docs/figures/{name}" in opening
    assert re.search(r'<img [^>]*alt="[^"]{20,}"', opening)
