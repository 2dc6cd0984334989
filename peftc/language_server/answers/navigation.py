"""Where names are defined, where they stand, and what renaming them changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lsprotocol import types

from peftc.diagnostics import Source, Span
from peftc.filesystem.open_texts import OpenTexts
from peftc.language_server.answers.rename import Renaming, check_owner
from peftc.language_server.diagnostics import positions_of
from peftc.language_server.documents import Document, Documents, uri_of
from peftc.language_server.library import Library
from peftc.language_server.names import FileNames
from peftc.language_server.symbols import Occurrence
from peftc.semantics.files import Include
from peftc.syntax.lexer import Token


@dataclass
class Navigation:
    """Answers at one place of a text.

    Attributes:
        documents: what is open.
        specs: the real paths of all files that may have the name.
    """

    document: Document
    offset: int
    library: Library
    documents: Documents
    specs: Sequence[str] = ()

    @cached_property
    def names(self) -> FileNames:
        return self.library.of(self.document)

    @cached_property
    def place(self) -> Occurrence | None:
        """The name at the place."""
        return self.names.at(self.offset)

    def definitions(self) -> list[types.Location]:
        """Where the name at the place is defined; of what `use` names, the file."""
        if self.place is None:
            return self._used_file()
        return [self._location(one, self.place.symbol.path) for one in self.library.definitions(self.place.symbol)]

    def _used_file(self) -> list[types.Location]:
        for statement in self.names.statements:
            if statement.rule == "use" and statement.span.start <= self.offset <= statement.span.end:
                last = statement.children[-1]
                is_on_it = isinstance(last, Token) and last.span.start <= self.offset <= last.span.end
                path = self.library.path_of_use(self.names, statement) if is_on_it else None
                names = None if path is None else self.library.file(path)
                if names is not None:
                    return [
                        types.Location(self._uri(names.path), types.Range(types.Position(0, 0), types.Position(0, 0)))
                    ]
        return []

    def references(self, with_definition: bool) -> list[types.Location]:
        """Where the name at the place stands, in all files."""
        if self.place is None:
            return []
        places = self.library.occurrences(self.place.symbol, self.specs)
        pairs = ((path, one) for path, own in places.items() for one in own)
        return [self._location(one, path) for path, one in pairs if with_definition or not one.is_definition]

    def highlights(self) -> list[types.DocumentHighlight]:
        """Where the name at the place stands in the text itself."""
        symbol = None if self.place is None else self.place.symbol
        kinds = types.DocumentHighlightKind
        return [
            types.DocumentHighlight(self._range(one.span), kinds.Write if one.is_definition else kinds.Read)
            for one in self.names.occurrences
            if one.symbol == symbol
        ]

    def renamable(self) -> types.Range | None:
        """The name at the place. Raises: Refusal for what the package defines."""
        if self.place is None:
            return None
        check_owner(self.place.symbol)
        return self._range(self.place.span)

    def rename(self, name: str, texts: OpenTexts, include: Include) -> types.WorkspaceEdit | None:
        """What a new name changes. Raises: Refusal."""
        if self.place is None:
            return None
        renaming = Renaming(self.library, texts, include, self.specs)
        places = renaming.occurrences(self.place.symbol, name)
        return types.WorkspaceEdit(
            changes={self._uri(path): [*self._edits(path, own, name)] for path, own in places.items()}
        )

    def _edits(self, path: str, places: Iterable[Occurrence], name: str) -> Iterable[types.TextEdit]:
        return (types.TextEdit(self._location(one, path).range, name) for one in places)

    def _range(self, span: Span) -> types.Range:
        return self.document.positions.range(span)

    def _uri(self, path: str) -> str:
        return self.documents.uri(Source(path, "")) or uri_of(path)

    def _location(self, place: Occurrence, path: str) -> types.Location:
        names = self.library.file(path)
        text = "" if names is None else names.partial.text
        return types.Location(self._uri(path), positions_of(text, self.document.encoding).range(place.span))
