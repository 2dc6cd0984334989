"""The standard recipes: what their files say of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from peftc.filesystem import resources
from peftc.semantics.expand import expand
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_expression, print_selector, print_statement

_NAME = r"[A-Z][\w’-]+"
_PAPER = re.compile(
    rf"((?:{_NAME} )*{_NAME}(?: et al\.| and {_NAME})?(?: \d{{4}}| \d\.\d+)?), "  # authors and year; a library
    r'(?:"([^"]+)", )?'  # title
    r"(?:arXiv:(\d{4}\.\d{4,5}))?"
)


@dataclass(frozen=True)
class Recipe:
    """A file of `specs/`.

    Attributes:
        name: as `use NAME from std` has it.
        path: of the file.
        text: of the file.
        comment: at the head of the file, line by line.
        method: its method.
    """

    name: str
    path: Path
    text: str
    comment: tuple[str, ...]
    method: ast.Method

    @property
    def summary(self) -> str:
        """The first sentence of the comment, without the name of the method before a colon."""
        text = " ".join(self.comment)
        head, colon, rest = text.partition(": ")
        text = rest if colon and len(head.split()) <= 5 else text
        return re.split(r"[.;] ", text)[0].rstrip(".")

    @property
    def paper(self) -> tuple[str, str | None, str | None]:
        """Authors with the year, the title, the number of arXiv."""
        for match in _PAPER.finditer(" ".join(self.comment)):
            authors, title, number = match.groups()
            if title or number:
                return authors, title, number
        return "", None, None

    @property
    def parameters(self) -> dict[str, str]:
        """The defaults of the method's parameters, as texts."""
        return {one.name: print_expression(one.default) for one in self.method.params}

    @property
    def changes(self) -> list[ast.Edit | ast.Train]:
        """The edits and `train` statements of the expanded method."""
        flat = expand(parse_text(self.text, str(self.path)))
        return [one for one in flat.statements if isinstance(one, ast.Edit | ast.Train)]

    @property
    def places(self) -> list[str]:
        """What it edits, without the layers: `attn.q`, `ffn`."""
        arms = (arm for one in self.changes for arm in print_selector(one.selector).split(" | "))
        return list(dict.fromkeys(re.sub(r"^layer\[[^\]]*\]\.", "", arm) for arm in arms))


@cache
def recipes() -> Mapping[str, Recipe]:
    """All recipes by name."""
    return {name: _read(name, path) for name, path in resources.recipes().items()}


def _read(name: str, path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8")
    method = next(s for s in parse_text(text, str(path)).statements if isinstance(s, ast.Method))
    return Recipe(name, path, text, tuple(comment_of(text)), method)


@cache
def form_text(recipe: str, form: str | None = None) -> str:
    """The text of a form in a recipe's file, with its comments; by default that of its name."""
    path = resources.recipes()[recipe]
    spec = parse_text(path.read_text(encoding="utf-8"), str(path))
    own = next(s for s in spec.statements if isinstance(s, ast.Form) and s.name == (form or recipe))
    return print_statement(own)


def comment_of(text: str) -> Iterator[str]:
    """The comment at the head of a file, which says what the recipe is and where it comes from."""
    for line in text.splitlines()[1:]:
        if line.startswith("#"):
            yield line.removeprefix("#").strip()
        elif line.strip():
            return
