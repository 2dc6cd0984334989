"""Renames what a name stands for, in all files that have it, or refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peftc.diagnostics import PeftcError
from peftc.filesystem.open_texts import OpenTexts, reading
from peftc.language_server.library import Library, is_packaged
from peftc.language_server.names import FileNames
from peftc.language_server.symbols import Occurrence, Symbol
from peftc.semantics.expand import check_file
from peftc.semantics.files import Include
from peftc.syntax.lexer import Lexemes
from peftc.syntax.parser import parse_text


class Refusal(Exception):
    """Why a name cannot be renamed."""


@dataclass(frozen=True)
class Renaming:
    """A new name for a symbol.

    Attributes:
        library: what reads files.
        texts: what is open.
        include: folders from which `use` may read.
        paths: of the files that may have the name.
    """

    library: Library
    texts: OpenTexts
    include: Include
    paths: Sequence[str]

    def occurrences(self, symbol: Symbol, name: str) -> Mapping[str, Sequence[Occurrence]]:
        """The places to change, by file. Raises: Refusal."""
        check_owner(symbol)
        if [token.type for token in Lexemes(f"peft 2 {name}").tokens] != ["PEFT", "NUMBER", "NAME", "$END"]:
            raise Refusal(f"`{name}` is not a name: letters, digits and `_`, and no keyword")
        places = self.library.occurrences(symbol, self.paths)
        self._check(places, symbol, name)
        return places

    def _check(self, places: Mapping[str, Sequence[Occurrence]], symbol: Symbol, name: str) -> None:
        """Raises: Refusal if there would be other errors, or a name would have another meaning."""
        old = {path: names.partial.text for path in places if (names := self.library.file(path)) is not None}
        new = {path: renamed(old[path], own, name) for path, own in places.items()}
        library = Library(OpenTexts({**self.texts.texts, **new}), self.include or ())
        for path in places:
            before, after = self.library.file(path), library.file(path)
            if before is None or after is None or meaning(before, symbol) != meaning(after, symbol, name):
                raise Refusal(f"`{name}` would stand for something else in {path}")
            first, then = self._codes(path, old[path], {}), self._codes(path, new[path], new)
            if any(code.startswith("P0") for code in first):
                raise Refusal(f"{path} has syntax errors: correct them first")
            if first != then:
                raise Refusal(
                    f"with `{name}`, {path} has {', '.join(sorted(set(then) - set(first))) or 'other errors'}"
                )

    def _codes(self, path: str, text: str, texts: Mapping[str, str]) -> list[str]:
        """The codes of the diagnostics of a text."""
        with reading(OpenTexts({**self.texts.texts, **texts})):
            try:
                return sorted(one.code for one in check_file(parse_text(text, path), self.include))
            except PeftcError as error:
                return sorted(one.code for one in error.diagnostics)


def check_owner(symbol: Symbol) -> None:
    """Raises: Refusal for what the package defines."""
    if is_packaged(symbol.path):
        what = "standard recipe" if symbol.kind in ("method", "parameter", "edit") else "built-in form"
        raise Refusal(f"`{symbol.owner or symbol.name}` is a {what}")


def renamed(text: str, places: Iterable[Occurrence], name: str) -> str:
    """A text with another name at some places."""
    for place in sorted(places, key=lambda one: one.span.start, reverse=True):
        text = text[: place.span.start] + name + text[place.span.end :]
    return text


def meaning(names: FileNames, symbol: Symbol, name: str | None = None) -> list[object]:
    """Which names of a text are one, where each is defined, and which of them is the symbol.

    Args: `name`: the new one of the symbol.
    """
    numbers: dict[Symbol, int] = {}
    known = {symbol.name if name is None else name}
    return [
        (
            numbers.setdefault(one.symbol, len(numbers)),
            one.is_definition,
            one.symbol.kind,
            one.symbol.path,
            one.symbol.name in known and one.symbol.kind == symbol.kind and one.symbol.path == symbol.path,
        )
        for one in names.occurrences
    ]
