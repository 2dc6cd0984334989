"""The page of a picture stands alone, and has the sites, the plan and the code in it."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import peftc
from peftc.cli.main import main
from peftc.pictures.code import GeneratedCode, Variant, side_by_side
from peftc.pictures.page import to_page
from tests import zoo
from tests.pictures.test_formats import HOSTILE, hostile
from tests.pictures.test_svg import text

pytestmark = pytest.mark.ahead_of_time  # a page shows the variants of ordinary calls

VOID = {"meta", "input", "br", "rect", "path", "circle"}
OPTIONAL_END = {"tr", "td", "th", "dt", "dd", "li"}


class Page(HTMLParser):
    """Tags that are open, the attributes of each, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in VOID | OPTIONAL_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in OPTIONAL_END:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def picture() -> Any:
    return peftc.show(text("order"), zoo.config("bert"))


@pytest.fixture(scope="module")
def page(picture: Any) -> str:
    return picture.html()


def test_a_page_is_balanced_and_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    ids = Counter(attributes["id"] for _, attributes in parsed.all if attributes.get("id"))
    assert set(ids.values()) == {1}
    for tag, attributes in parsed.all:
        assert tag not in ("link", "iframe", "object", "img", "base")
        assert not {"src", "srcset", "xlink:href"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|fetch\(|eval\(", page)


def test_links_and_labels_lead_somewhere(page: str) -> None:
    parsed = Page(page)
    ids = {attributes.get("id") for _, attributes in parsed.all}
    assert {(a.get("href") or "")[1:] for tag, a in parsed.all if tag == "a"} <= ids
    assert {a.get("for") for _, a in parsed.all if "for" in a} <= ids
    for _, attributes in parsed.all:
        assert set((attributes.get("aria-labelledby") or "").split()) <= ids
    assert all("tabindex" in a and "aria-label" in a for _, a in parsed.all if a.get("role") == "region")


def test_a_page_has_the_plan_the_sites_and_the_code(page: str, picture: Any) -> None:
    shown = " ".join(Page(page).texts)
    for edit in picture.plan.edits:
        assert f"{edit.stored:,}" in shown
        assert edit.reason in shown
    assert "layer[0..2] × 3" in shown
    codes = picture.listing()
    assert all(code.lines for code in codes)
    generated = [line for code in codes for variant in code.variants for line in variant.lines]
    assert any("# edit a: h += 2 * adapter(x" in line for line in generated)
    rows = page.count('class="row find')
    listed = [len(list(side_by_side(one.lines, v.lines))) for one in picture.listing() for v in one.variants]
    assert rows == sum(listed)


def test_every_line_of_both_codes_is_in_the_rows() -> None:
    before, after = ["a", "b", "c", "d"], ["a", "x", "y", "c", "d", "e"]
    rows = list(side_by_side(before, after))
    assert [line[1] for line, _, _ in rows if line] == before
    assert [line[1] for _, line, _ in rows if line] == after
    assert [equal for _, _, equal in rows] == [True, False, False, True, True, False]


def test_hostile_names_are_text_on_a_page(picture: Any) -> None:
    lines = (HOSTILE, "</code></script><img src=x onerror=alert(1)>")
    code = (GeneratedCode(HOSTILE, (HOSTILE,), HOSTILE, lines, (Variant(HOSTILE, HOSTILE, lines),)),)
    page = to_page(hostile(picture.diagram), picture.plan, picture.table, HOSTILE, code)
    parsed = Page(page)
    assert parsed.open == []
    assert [tag for tag, _ in parsed.all].count("script") == 1
    assert "img" not in {tag for tag, _ in parsed.all}
    assert not any(name.startswith("on") for _, attributes in parsed.all for name in attributes)


def test_the_page_leaves_the_model_as_it_is() -> None:
    """The code is generated on a skeleton, which others use after it."""
    model = zoo.build("bart")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    peftc.show(text("mam"), model).html()
    assert [type(module) for module in model.modules()] == classes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    peftc.compile(text("mam"), model, seed=0, verify=True)
    assert peftc.show(text("houlsby"), model).html()
    assert list(peftc.specs(model)) == ["default"]


def test_the_command_writes_a_page(tmp_path: Path, picture: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spec, config, target = tmp_path / "spec.peft", tmp_path / "config.json", tmp_path / "page.html"
    spec.write_text(text("order"))
    zoo.config("bert").to_json_file(str(config), use_diff=False)
    assert main(["show", str(spec), "--model", str(config), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    assert target.read_text(encoding="utf-8").count('class="row find') == picture.html().count('class="row find')


def test_notebooks_show_the_figure_and_the_edits(picture: Any) -> None:
    parsed = Page(picture._repr_html_())
    assert parsed.open == []
    assert "script" not in {tag for tag, _ in parsed.all}
    assert picture._repr_svg_() == picture.svg()
