"""Generated code beside the code of the model, as rows of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from peftc.diagnostics.markup import clean


@dataclass(frozen=True)
class Variant:
    """One generated forward. `caption`: the calls that it is for."""

    name: str
    caption: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class GeneratedCode:
    """The generated forwards of modules of one kind.

    Attributes:
        name: of their class.
        modules: their dotted names.
        original: the name of the model's own forward.
        lines: of it; none where its source is not known.
    """

    name: str
    modules: tuple[str, ...]
    original: str
    lines: tuple[str, ...]
    variants: tuple[Variant, ...]


Line = tuple[int, str] | None  # a number and a text


def side_by_side(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[Line, Line, bool]]:
    """Lines of both texts next to each other, and whether they are equal."""
    matcher = SequenceMatcher(None, before, after, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        left = [(i + 1, before[i]) for i in range(a, b)]
        right = [(i + 1, after[i]) for i in range(c, d)]
        yield from ((one, other, tag == "equal") for one, other in zip_longest(left, right))


def code_section(code: Sequence[GeneratedCode]) -> Iterator[str]:
    """For each kind of modules, each variant beside the original."""
    for one in code:
        modules = f"{one.modules[0]}" + (f" and {len(one.modules) - 1} more" if len(one.modules) > 1 else "")
        yield f'<article class="find-in"><h3><code>{clean(one.name)}</code></h3><p>{clean(modules)}</p>'
        for i, variant in enumerate(one.variants):
            summary = f"<code>{clean(variant.name)}</code> {clean(variant.caption)}"
            yield f"<details{' open' if not i else ''}><summary>{summary}</summary>"
            label = f"{one.original} and {variant.name}"
            yield f'<div class="diff" role="region" tabindex="0" aria-label="{clean(label)}">'
            yield f'<div class="row heads"><span>{clean(one.original)}</span><span>generated</span></div>'
            for left, right, equal in side_by_side(one.lines, variant.lines):
                sides = _side(left, "old", "−"), _side(right, "new", "+")
                yield f'<div class="row find{" same" if equal else " other"}">{"".join(sides)}</div>'
            yield "</div></details>"
        yield "</article>"


def _side(line: Line, name: str, sign: str) -> str:
    if line is None:
        return f'<span class="{name} none"></span>'
    number, text = line
    return f'<span class="{name}"><i data-sign="{sign}">{number}</i><code>{clean(text) or " "}</code></span>'
