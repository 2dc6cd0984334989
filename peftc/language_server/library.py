"""The files whose names a text may use, and those that may use its names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from peftc.diagnostics import PeftcError
from peftc.equations.table import FORMS, form_errors, forms_of
from peftc.filesystem import resources
from peftc.filesystem.open_texts import OpenTexts, open_text, reading
from peftc.forms.form import Form
from peftc.language_server.documents import Document
from peftc.language_server.names import FileNames
from peftc.language_server.symbols import Occurrence, Symbol
from peftc.semantics.files import Folders, read_text
from peftc.syntax.automaton import Tree
from peftc.syntax.lexer import Token, begins_as_spec
from peftc.syntax.parser import parse_text
from peftc.syntax.partial import PartialText

_MOST_FILES = 2_000  # of a workspace


class Library:
    """Reads names, each file once.

    Args:
        texts: what is open.
        include: folders from which `use` may read, besides that of a spec.
    """

    def __init__(self, texts: OpenTexts, include: Iterable[str | os.PathLike[str]] = ()) -> None:
        self._texts, self._include = texts, tuple(Path(os.path.realpath(name)) for name in include)
        self._files: dict[str, FileNames | None] = {}

    def of(self, document: Document) -> FileNames:
        """The names of a text that is open."""
        names = FileNames(document.path, document.partial, self._used, built_in_file)
        self._files[document.path] = names
        return names

    def file(self, path: str) -> FileNames | None:
        """The names of a spec; None for a file that is none, or cannot be read."""
        if path not in self._files:
            text = self._read(path)
            names = None if text is None else FileNames(path, PartialText(text), self._used, built_in_file)
            self._files[path] = names
        return self._files[path]

    def _read(self, path: str) -> str | None:
        try:
            with reading(self._texts):
                data = open_text(path)
            text = read_text(path) if data is None else data.decode("utf-8", "surrogatepass")
        except (OSError, PeftcError):
            return None
        return text if begins_as_spec(text) else None

    def _used(self, names: FileNames, use: Tree) -> FileNames | None:
        path = self.path_of_use(names, use)
        return None if path is None else self.file(path)

    def path_of_use(self, names: FileNames, use: Tree) -> str | None:
        """The file that a `use` names: within the folders in which it may read."""
        words = [child for child in use.children if isinstance(child, Token)]
        if len(words) < 4:
            return None
        if words[3].type != "STRING":
            recipe = resources.recipes().get(words[1].text)
            return None if recipe is None or words[3].text != "std" else os.path.realpath(recipe)
        if not os.path.isabs(names.path):  # a text without a file
            return None
        folder = Path(names.path).parent
        try:
            with reading(self._texts):
                return str(Folders(folder, self._include).find(words[3].text[1:-1], folder))
        except (OSError, ValueError, PeftcError):
            return None

    def form(self, name: str, names: FileNames) -> Form | None:
        """A form that a text may call; None if there is none, or if its text has errors."""
        symbol = names.definition("form", name)
        owner = None if symbol is None or is_packaged(symbol.path) else self.file(symbol.path)
        tree = None if owner is None else owner.statement("form", name)
        if owner is None or tree is None:
            return FORMS.get(name)
        try:
            spec = parse_text(f"peft 2\n{owner.partial.text[tree.span.start : tree.span.end]}\n")
            return None if any(form_errors(spec)) else forms_of(spec)[name]
        except PeftcError:
            return None

    def definitions(self, symbol: Symbol) -> Iterator[Occurrence]:
        """Where a name is defined."""
        if (names := self.file(symbol.path)) is not None:
            yield from (one for one in names.occurrences if one.symbol == symbol and one.is_definition)

    def occurrences(self, symbol: Symbol, paths: Iterable[str]) -> dict[str, list[Occurrence]]:
        """The places of a name in some files, and in the one that defines it."""
        places: dict[str, list[Occurrence]] = {}
        for path in dict.fromkeys((symbol.path, *(() if symbol.is_local else paths))):
            names = self.file(path)
            own = [one for one in names.occurrences if one.symbol == symbol] if names is not None else []
            if own:
                places[path] = own
        return places


def built_in_file(name: str) -> str | None:
    """The file of a built-in form that is a text."""
    path = resources.forms().get(name)
    return None if path is None else os.path.realpath(path)


def is_packaged(path: str) -> bool:
    """Whether a file is one of the package: a built-in form or a standard recipe."""
    folders = (os.path.realpath(resources.folder(name)) for name in ("forms", "specs"))
    return os.path.dirname(path) in folders


def specs_of(folders: Iterable[str]) -> list[str]:
    """The specs below the folders of a workspace, by their real paths."""
    paths: dict[str, None] = {}
    for folder in folders:
        root = os.path.realpath(folder)
        for path in Path(root).rglob("*.peft"):
            real = os.path.realpath(path)
            if os.path.commonpath((root, real)) == root:
                paths[real] = None
            if len(paths) >= _MOST_FILES:
                return list(paths)
    return list(paths)
