"""The one record behind every message of peftc, and the one exception that carries it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from peftc.diagnostics.span import Span

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Source:
    """A text and the name it is shown under."""

    path: str
    text: str


@dataclass(frozen=True)
class Diagnostic:
    """One cause, one message.

    `label` stands beside the underlined span; `notes` are facts; `help` is something that can be done about it.
    """

    code: str
    message: str
    span: Span | None = None
    source: Source | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    help: str | None = None
    severity: Severity = "error"

    def with_source(self, source: Source) -> Diagnostic:
        """This diagnostic, said of `source` if it did not name a text yet."""
        return self if self.source else replace(self, source=source)

    def __str__(self) -> str:
        where = (
            f"{printable(self.source.path)}:{self.span.line}:{self.span.column}: " if self.source and self.span else ""
        )
        notes = "".join(f"\n  note: {printable(note)}" for note in self.notes)
        tail = notes + (f"\n  help: {printable(self.help)}" if self.help else "")
        return f"{where}{self.severity}[{self.code}]: {printable(self.message)}{tail}"


def printable(text: str) -> str:
    """A text of anyone's as messages show it: on one line, without what a terminal or a program that reads the log obeys."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class PeftcError(Exception):
    """Bad input, told as diagnostics; nothing has been changed."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        found = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__(found)
        self.diagnostics: tuple[Diagnostic, ...] = found

    def __str__(self) -> str:
        return "\n".join(map(str, self.diagnostics))


class PeftcWarning(UserWarning):
    """Something that may be wrong, told as a diagnostic; what was asked for is done all the same."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.diagnostic: Diagnostic = diagnostic

    @property
    def code(self) -> str:
        """The code of the diagnostic."""
        return self.diagnostic.code

    def __str__(self) -> str:
        return str(self.diagnostic)


def warn(diagnostic: Diagnostic) -> None:
    """Issues a `PeftcWarning` at the line outside of peftc that has called it."""
    level, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # what `warnings` itself uses
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "peftc":
        level, frame = level + 1, frame.f_back
    warnings.warn(PeftcWarning(replace(diagnostic, severity="warning")), stacklevel=level)
