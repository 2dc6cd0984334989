"""The record behind every message of peftc, and the exception that carries it."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]
Applicability = Literal["safe", "unsafe"]


@dataclass(frozen=True)
class Source:
    """A text, and the path that messages show for it.

    Attributes:
        path: of the file, or a name such as `<text>`.
        text: all of it.
    """

    path: str
    text: str


class Span(NamedTuple):
    """A half-open range of a text: offsets in characters from 0, lines and columns from 1.

    Attributes:
        start: the offset of the first character.
        end: the offset behind the last one.
        line: of the first character.
        column: of the first character.
        end_line: of the end.
        end_column: of the end.
    """

    start: int
    end: int
    line: int
    column: int
    end_line: int
    end_column: int

    def until(self, other: Span) -> Span:
        """The span from the start of this one to the end of `other`."""
        return Span(self.start, other.end, self.line, self.column, other.end_line, other.end_column)

    def first(self, length: int) -> Span:
        """The first `length` characters of a span that begins with a word."""
        if self.end - self.start <= length:
            return self
        return Span(self.start, self.start + length, self.line, self.column, self.line, self.column + length)


NOWHERE = Span(0, 0, 1, 1, 1, 1)


@dataclass(frozen=True)
class Related:
    """A second place that a diagnostic is about, such as the text of a form that is called.

    Attributes:
        span: the place in the text of `source`.
        source: the text and its path.
        message: what is there.
    """

    span: Span
    source: Source
    message: str = ""


class Suggestion(str):
    """A text for `Diagnostic.help` that names a correction: `old`, in the place of the diagnostic,
    becomes `new`.

    Attributes:
        old: the words in the text.
        new: what replaces them.
        applicability: as of `Fix`.
    """

    old: str
    new: str
    applicability: Applicability

    def __new__(cls, text: str, old: str, new: str, applicability: Applicability = "safe") -> Suggestion:
        self = super().__new__(cls, text)
        self.old, self.new, self.applicability = old, new, applicability
        return self

    def __reduce__(self) -> tuple[type[Suggestion], tuple[str, str, str, Applicability]]:  # copies and pickles
        return Suggestion, (str(self), self.old, self.new, self.applicability)


class Replacement(NamedTuple):
    """A change of a text.

    Attributes:
        span: what is replaced.
        text: what stands there then.
    """

    span: Span
    text: str


class Fix(NamedTuple):
    """What corrects a diagnostic.

    Attributes:
        replacements: changes of the text of its source, which do not overlap.
        applicability: "safe" if `check --fix` may apply it, else "unsafe".
    """

    replacements: tuple[Replacement, ...]
    applicability: Applicability = "safe"


@dataclass(frozen=True)
class Diagnostic:
    """One error or warning.

    Attributes:
        code: such as "P201"; `peftc explain` says what it means.
        message: what is wrong.
        span: the place in the text of `source`.
        source: the text and its path.
        label: text beside the underlined span.
        notes: facts about the cause.
        help: what the user can do.
        severity: "error" or "warning".
        related: further places.
        correction: a fix that does not follow from `help`.
    """

    code: str
    message: str
    span: Span | None = None
    source: Source | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    help: str | None = None
    severity: Severity = "error"
    related: tuple[Related, ...] = ()
    correction: Fix | None = None

    @property
    def fix(self) -> Fix | None:
        """Changes of the text that correct it, if a program can tell."""
        if self.source is None or self.span is None:
            return None
        if self.correction is None and isinstance(self.help, Suggestion):
            at = _word_in(self.source.text, self.span, self.help.old)
            return None if at is None else Fix((Replacement(at, self.help.new),), self.help.applicability)
        return self.correction

    def with_source(self, source: Source) -> Diagnostic:
        """This diagnostic, with `source` if it has no source yet."""
        return self if self.source else replace(self, source=source)

    def __str__(self) -> str:
        at = f"{printable(self.source.path)}:{self.span.line}:{self.span.column}: " if self.source and self.span else ""
        notes = "".join(f"\n  note: {printable(note)}" for note in self.notes)
        for place in self.related:
            path = printable(place.source.path)
            notes += f"\n  {path}:{place.span.line}:{place.span.column}: {printable(place.message)}"
        help_ = f"\n  help: {printable(self.help)}" if self.help else ""
        label = f" ({printable(self.label)})" if self.label else ""
        return f"{at}{self.severity}[{self.code}]: {printable(self.message)}{label}{notes}{help_}"


def _word_in(text: str, span: Span, word: str) -> Span | None:
    """The first place of a word within a span on one line."""
    before, after = r"(?<!\w)" if word[:1].isalnum() else "", r"(?!\w)" if word[-1:].isalnum() else ""
    match = re.compile(before + re.escape(word) + after).search(text, span.start, span.end) if word else None
    if match is None or "\n" in text[span.start : match.end()]:
        return None
    column = span.column + match.start() - span.start
    return Span(match.start(), match.end(), span.line, column, span.line, column + len(word))


def printable(text: str) -> str:
    """`text` escaped, on one line: untrusted text must not control a terminal or forge a log."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class PeftcError(Exception):
    """Invalid input, described by `diagnostics`. Nothing has been changed."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]) -> None:
        records = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__(records)
        self.diagnostics: tuple[Diagnostic, ...] = records

    def __str__(self) -> str:
        return "\n".join(map(str, self.diagnostics))


class PeftcWarning(UserWarning):
    """A possible mistake, described by a diagnostic. The operation continues."""

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
    """Issues a `PeftcWarning` at the innermost caller outside peftc."""
    level, frame = 2, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # as `warnings` does
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "peftc":
        level, frame = level + 1, frame.f_back
    warnings.warn(PeftcWarning(replace(diagnostic, severity="warning")), stacklevel=level)
