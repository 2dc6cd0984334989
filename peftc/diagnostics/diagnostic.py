"""The one record behind every message of peftc, and the one exception that carries it."""

from __future__ import annotations

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

    def within(self, source: Source) -> Diagnostic:
        """This diagnostic, said of `source` if it did not name a text yet."""
        return self if self.source else replace(self, source=source)

    def __str__(self) -> str:
        where = f"{self.source.path}:{self.span.line}:{self.span.column}: " if self.source and self.span else ""
        tail = "".join(f"\n  note: {note}" for note in self.notes) + (f"\n  help: {self.help}" if self.help else "")
        return f"{where}{self.severity}[{self.code}]: {self.message}{tail}"


class PeftcError(Exception):
    """Bad input, told as diagnostics; nothing has been changed."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        found = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__(found)
        self.diagnostics: tuple[Diagnostic, ...] = found

    def __str__(self) -> str:
        return "\n".join(map(str, self.diagnostics))
