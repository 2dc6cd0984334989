"""The gallery, `docs/gallery.md`: every recipe with its picture, its equations, what it costs on
four models, and what PEFT and AdapterHub call it.

python -m tools.gallery_page
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import peftc
from peftc.planning.report.plan import percent
from peftc.semantics.recipes import Recipe, recipes
from tools.gallery_pictures import picture
from tools.peer_names import hub_name, peft_name

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURES = DOCS / "figures" / "gallery"
MODELS = ("bert-base-uncased", "facebook/bart-large", "t5-base", "meta-llama/Llama-2-7b-hf")
NONE = "—"

HEAD = """# Gallery

Every recipe of `specs/`: what it is, one layer with it, its equations, and what it costs. `make docs` makes this page;
a test compares it with what it is made of:

- The text is the comment of the recipe's file, and the block is the rest of that file. `use NAME from std` finds it;
  see [forms and recipes](forms.md#recipes).
- The picture is what [`peftc show`](pictures.md) draws, of the first of the four models below that the recipe fits: the
  layer with the most edits. A click opens it alone, as large as you like.
- The counts are those of `peftc plan specs/NAME.peft --model MODEL`, with the defaults of the recipe: how many
  parameters are trained, how much that is of the model's, and how many a saved adapter has. `—` with a code is a model
  that the recipe does not fit; `peftc explain CODE` says why.
- The names of peers are those of PEFT's types, and of the configurations of AdapterHub's library. What `export` writes
  is read off an export of a small BERT, BART or LLaMA with the recipe. A name says that the method is the same;
  equations may differ in details, and [exchange](exchange.md) has those that peftc reads and writes.

"""


def page() -> str:
    """The whole page, in Markdown."""
    return HEAD + "\n".join([index(), *map(section, recipes().values())])


def index() -> str:
    """A line for each recipe."""
    lines = [f"| recipe | | of {MODELS[0]} |", "|---|---|--:|"]
    for recipe in recipes().values():
        trained, share, _ = counts(recipe.path, MODELS[0])
        lines.append(f"{entry_of(recipe)} {share if share != NONE else trained} |")
    return "\n".join([*lines, ""])


def entry_of(recipe: Recipe) -> str:
    """The line of the index, but for the count."""
    summary = recipe.summary[0].upper() + recipe.summary[1:]
    return f"| [`{recipe.name}`](#{recipe.name}) | {summary} |"


def section(recipe: Recipe) -> str:
    """One recipe."""
    return "\n".join([text_of(recipe), *table(recipe.path), "", peers_of(recipe), ""])


def peers_of(recipe: Recipe) -> str:
    """What peers call it."""
    return f"PEFT: {peft_name(recipe.name, recipe.path)}. AdapterHub: {hub_name(recipe.name, recipe.path)}."


def text_of(recipe: Recipe) -> str:
    """What is made of the file alone."""
    name = recipe.name
    figure = f"figures/gallery/{name}.svg"
    return "\n".join(
        [
            f"## `{name}`",
            "",
            with_links("\n".join(recipe.comment)),
            "",
            f"[![{name}]({figure})]({figure})",
            "",
            f"<!-- recipe: {name} -->",
            f"```peft\n{statements_of(recipe)}```",
            "",
        ]
    )


def with_links(text: str) -> str:
    """A text in which the papers of arXiv are links."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def statements_of(recipe: Recipe) -> str:
    """A file without its version and its comment."""
    lines = recipe.text.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if i and line.strip() and not line.startswith("#"))
    return "".join(lines[first:])


def table(path: Path) -> Iterator[str]:
    """What a recipe costs on each model."""
    yield "| model | trained | of the model | stored |"
    yield "|---|--:|--:|--:|"
    for model in MODELS:
        yield f"| {model} | {' | '.join(counts(path, model))} |"


@cache
def counts(path: Path, model: str) -> Sequence[str]:
    """Trained parameters, their share of the model's, stored ones."""
    try:
        totals = peftc.plan(path, model).totals
    except peftc.PeftcError as error:
        return (f"{NONE} {error.diagnostics[0].code}", NONE, NONE)
    return (f"{totals.trained:,}", percent(totals.trained, totals.base), f"{totals.stored:,}")


def model_of(path: Path) -> str:
    """The first model that a recipe fits."""
    return next(model for model in MODELS if counts(path, model)[1] != NONE)


def main() -> None:
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8", newline="\n")
    FIGURES.mkdir(parents=True, exist_ok=True)
    for old in FIGURES.glob("*.svg"):
        if old.stem not in recipes():
            old.unlink()
    for recipe in recipes().values():
        svg = picture(recipe.path, model_of(recipe.path))
        (FIGURES / f"{recipe.name}.svg").write_text(svg, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
