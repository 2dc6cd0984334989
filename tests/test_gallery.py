"""The gallery shows every recipe as it is: file, picture, counts, and names elsewhere."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from peftc.exchange.peft_format.table import TYPES, WITHOUT_EQUATION
from peftc.semantics.recipes import Recipe, recipes
from tests.matrix import FULL, some
from tools import gallery_page as gallery
from tools.gallery_pictures import SVG, compact, picture, relative
from tools.peer_names import hub_configs, same_name

RECIPES = list(recipes().values())
PAGE = (gallery.DOCS / "gallery.md").read_text(encoding="utf-8")
ANEW = "run `make docs` and read what has changed"
LARGEST = 15_000  # bytes of a picture
# Traces of the others take seconds each: the full run has them.
MODELS = gallery.MODELS if FULL else gallery.MODELS[:1]
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")


def sections() -> dict[str, str]:
    """The text of each recipe's section, by its name."""
    starts = [(m[1], m.start()) for m in re.finditer(r"^## `(\w+)`$", PAGE, re.M)]
    ends = [*starts, ("", len(PAGE) + 1)]
    return {name: PAGE[start : end - 1] for (name, start), (_, end) in pairwise(ends)}


def test_every_recipe_has_a_section_and_a_picture() -> None:
    names = [recipe.name for recipe in RECIPES]
    assert list(sections()) == names
    assert sorted(path.stem for path in gallery.FIGURES.iterdir()) == sorted(names)
    assert PAGE[: len(gallery.HEAD)] == gallery.HEAD, ANEW


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_section_has_the_file_and_a_row_for_each_model(recipe: Recipe) -> None:
    text = sections()[recipe.name]
    assert text.startswith(gallery.text_of(recipe)), ANEW
    rows = re.findall(r"^\| (\S+) \| ([\d,]+|— P\d{3}) \| ([\d.]+ %|—) \| ([\d,]+|—) \|$", text, re.M)
    assert [row[0] for row in rows] == list(gallery.MODELS)
    share = next((row[2] if row[2] != gallery.NONE else row[1] for row in rows), "")
    assert f"{gallery.entry_of(recipe)} {share} |" in PAGE, ANEW
    assert re.search(r"^PEFT: .+\. AdapterHub: .+\.$", text, re.M)


@pytest.mark.parametrize("recipe", some(RECIPES, 7), ids=lambda recipe: recipe.name)
def test_counts_are_those_of_plans(recipe: Recipe) -> None:
    for model in MODELS:
        assert f"\n| {model} | {' | '.join(gallery.counts(recipe.path, model))} |\n" in sections()[recipe.name], ANEW


@pytest.mark.parametrize("recipe", some(RECIPES, 11), ids=lambda recipe: recipe.name)
def test_pictures_and_names_are_made_anew(recipe: Recipe) -> None:
    if FULL or gallery.counts(recipe.path, MODELS[0])[1] != gallery.NONE:
        svg = picture(recipe.path, gallery.model_of(recipe.path))
        assert (gallery.FIGURES / f"{recipe.name}.svg").read_text(encoding="utf-8") == svg, ANEW
    assert gallery.peers_of(recipe) in sections()[recipe.name], ANEW


@pytest.mark.parametrize("name", list(recipes()))
def test_a_picture_is_small_and_for_both_themes(name: str) -> None:
    text = (gallery.FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert len(text.encode()) < LARGEST
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href|url\(|@import|<script", text)
    style = root.findtext(f"{SVG}style") or ""
    for one in root.iter():
        for word in one.get("class", "").split():
            if word.startswith("e") and word[1:].isdigit():
                assert f".{word}{{" in style
                assert style.count(f"--c{word[1:]}:") == 2
    assert root.findtext(f"{SVG}desc")


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("M24,1387 C24,1300 24,900 24,797.5", "M24 1387v-589.5"),
        ("M10,5 C20,5 30,5 40.5,5 50,6 60,9 70,20", "M10 5h30.5c9.5 1 19.5 4 29.5 15"),
        ("M3.2,2 L-3.1,2 L0,-5 z", "M3.2 2h-6.3l3.1-7z"),
        ("M0,0 L0.5,-0.5", "M0 0l.5-.5"),
        ("M0,0 C10,10 20,20 30,30", "M0 0l30 30"),
        ("M0,0 C0,9 30,21 30,30", "M0 0c0 9 30 21 30 30"),
    ],
)
def test_paths_are_shorter_and_the_same(path: str, short: str) -> None:
    assert relative(path) == short


def test_a_compact_picture_has_every_word_of_the_picture() -> None:
    shown = '<text x="1" y="2" class="mid">q</text>'
    line = '<path d="M0,0 C0,9 30,21 30,30" class="edge"/>'
    style = ".peftc .mid{a:b}.peftc .soft{c:d}.peftc .e1{e:f}.peftc .edit .edge{g:h}"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="peftc"><style>{style}</style>'
        f'<g class="panel" data-layers="2"><g transform="t"><g class="edit e1">{line}</g>{line}'
        f'<g class="frozen"><title>t</title>{shown}</g><g class="edit e1" data-edit="a">{shown}</g>'
        f'<g class="edit e1">{shown}</g></g></g></svg>'
    )
    root = ElementTree.fromstring(compact(svg))
    assert [one.text for one in root.iter(f"{SVG}text")] == ["q"] * 3
    assert len(list(root.iter(f"{SVG}path"))) == 2
    assert [group.get("class") for group in root.iter(f"{SVG}g")] == [None, None, "edit e1", "edit e1"]
    assert root.findtext(f"{SVG}style") == ".mid{a:b}.e1{e:f}.edit .edge{g:h}"


def test_names_of_peers_are_found_in_other_letters() -> None:
    types, configs = [*TYPES, *WITHOUT_EQUATION], hub_configs()
    assert [same_name(name, types) for name in ("ia3", "p_tuning", "prefix", "houlsby")] == [
        "IA3",
        "P_TUNING",
        "PREFIX_TUNING",
        None,
    ]
    assert [same_name(name, configs) for name in ("compacter_pp", "prefix", "mam", "lokr")] == [
        "compacter++",
        "prefix_tuning",
        "mam",
        None,
    ]
