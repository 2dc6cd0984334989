"""The texts that the client has open, and the settings of the client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lsprotocol.types import PositionEncodingKind
from pygls.uris import from_fs_path, to_fs_path

from peftc.diagnostics import Source
from peftc.filesystem import resources
from peftc.language_server.positions import Positions
from peftc.syntax.partial import PartialText


@dataclass(frozen=True)
class Document:
    """One version of an open text.

    Attributes:
        uri: as the client writes it.
        path: of its file; the URI of a text that has no file.
        has_file: whether it has a file, so that it may use others.
        number: counts all versions of all texts.
    """

    uri: str
    text: str
    version: int | None
    number: int
    path: str
    has_file: bool
    encoding: str = PositionEncodingKind.Utf16.value

    @cached_property
    def positions(self) -> Positions:
        return Positions(self.text, self.encoding)

    @cached_property
    def partial(self) -> PartialText:
        """Its parse trees, as far as it goes."""
        return PartialText(self.text)

    @property
    def folder(self) -> Path | None:
        return Path(self.path).parent if self.has_file else None


def path_of(uri: str) -> str | None:
    """The real path of a URI of a file; None for all other URIs."""
    try:
        path = to_fs_path(uri)
        if not path or not os.path.isabs(path):
            return None
        os.fsencode(path)
        return os.path.realpath(path)
    except (ValueError, OSError):  # a NUL, a lone surrogate, an IPv6 address that is none
        return None


def uri_of(path: str) -> str:
    """The URI of a path."""
    return from_fs_path(os.path.abspath(path)) or ""


def file_of(source: Source) -> str | None:
    """The real path of the file that has a source; None for a name such as `<text>`."""
    path = Path(source.path)
    if path.parent.name == "forms" and not path.is_absolute() and path.stem in resources.forms():
        return os.path.realpath(resources.forms()[path.stem])
    is_file = path.is_absolute() or path.suffix == ".toml"  # a configuration is shown by a relative path
    return os.path.realpath(path) if is_file and "\0" not in source.path else None


class Documents:
    """All texts that are open, in their last version."""

    def __init__(self) -> None:
        self._of: dict[str, Document] = {}
        self._count = 0

    def open(self, uri: str, text: str, version: int | None, encoding: str) -> Document:
        """A new version of a text."""
        path = path_of(uri)
        self._count += 1
        document = Document(uri, text, version, self._count, path or uri, path is not None, encoding)
        self._of[uri] = document
        return document

    def close(self, uri: str) -> Document | None:
        return self._of.pop(uri, None)

    def get(self, uri: str) -> Document | None:
        return self._of.get(uri)

    def is_current(self, document: Document) -> bool:
        """Whether there is no newer version."""
        return self._of.get(document.uri) is document

    def texts(self) -> dict[str, str]:
        """The texts of files, by their real paths."""
        return {one.path: one.text for one in self if one.has_file}

    def at(self, path: str) -> Document | None:
        """The text that is open of a file, by its real path."""
        return next((one for one in self if one.path == path), None)

    def uri(self, source: Source) -> str | None:
        """The URI of the file of a source, as the client writes it if it is open."""
        if (own := self.at(source.path)) is not None:
            return own.uri
        if (path := file_of(source)) is None:
            return None
        return uri_of(path) if (own := self.at(path)) is None else own.uri

    def __iter__(self) -> Iterator[Document]:
        return iter(tuple(self._of.values()))


@dataclass(frozen=True)
class Settings:
    """What the client has configured.

    Attributes:
        models: in the place of those of the configuration.
        tasks: of `per task` edits on these models.
    """

    models: tuple[str, ...] = ()
    tasks: tuple[str, ...] | None = None
    errors: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def read(cls, values: object) -> Settings:
        """The settings `peftc` of a client: `model`, a name or a list of names; `tasks`."""
        section = values.get("peftc", values) if isinstance(values, Mapping) else None
        if not isinstance(section, Mapping):
            return cls()
        errors: list[str] = []
        models, tasks = (_names(section, key, errors) for key in ("model", "tasks"))
        return cls(models or (), tasks or None, tuple(errors))


def _names(section: Mapping[str, Any], key: str, errors: list[str]) -> tuple[str, ...] | None:
    value = section.get(key)
    names = [value] if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        errors.append(f"`peftc.{key}` is a name or a list of names")
        return None
    return tuple(name.strip() for name in names if name.strip())
