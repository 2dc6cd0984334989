"""What a report in any format is made of: each diagnostic once, and what was looked at."""

import os
from pathlib import PurePath
from typing import NamedTuple

from peftc.diagnostics.diagnostic import Diagnostic, Source, Span, printable


class Case(NamedTuple):
    """A spec that was looked at, alone or on a model.

    Attributes:
        path: of the spec, or `<stdin>`.
        model: its name; None for the spec alone.
        diagnostics: what there is to say.
    """

    path: str
    model: str | None
    diagnostics: tuple[Diagnostic, ...]


class Suppressed(NamedTuple):
    """A warning that a comment in the spec suppresses.

    Attributes:
        diagnostic: the warning.
        reason: what the comment says.
    """

    diagnostic: Diagnostic
    reason: str


class Report(NamedTuple):
    """The result of a command.

    Attributes:
        diagnostics: each once, in the order of files and places.
        cases: what was looked at, those without diagnostics too.
        suppressed: warnings that comments suppress.
        strict: warnings count as errors.
    """

    diagnostics: tuple[Diagnostic, ...]
    cases: tuple[Case, ...]
    suppressed: tuple[Suppressed, ...] = ()
    strict: bool = False

    def path(self, diagnostic: Diagnostic) -> str:
        """The file of a diagnostic; that of the first case where it has none."""
        if diagnostic.source is not None:
            return diagnostic.source.path
        return self.cases[0].path if self.cases else "peftc"

    def fails(self, diagnostic: Diagnostic) -> bool:
        """Whether a diagnostic makes the exit code 1."""
        return self.strict or diagnostic.severity == "error"


def report_on(path: str, model: str | None, diagnostics: tuple[Diagnostic, ...], strict: bool = False) -> Report:
    """The report on one spec."""
    return Report(diagnostics, (Case(path, model, diagnostics),), strict=strict)


def relative_path(path: str) -> str:
    """A path as CI services want it: with `/`, relative to the working directory if it is below."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive of Windows, or an empty path
        relative = path
    inside = os.path.isabs(path) and not relative.startswith(os.pardir)
    normal = relative if inside else os.path.normpath(path)
    return printable(PurePath(normal).as_posix())


def full_text(diagnostic: Diagnostic) -> str:
    """The message with its notes and its help, a line each."""
    lines = [diagnostic.message, *(f"note: {note}" for note in diagnostic.notes)]
    return "\n".join(map(printable, [*lines, f"help: {diagnostic.help}"] if diagnostic.help else lines))


def line_text(source: Source | None, span: Span | None) -> str:
    """The first line of a span."""
    lines = source.text.split("\n") if source and span else []
    return lines[span.line - 1].strip() if span and span.line <= len(lines) else ""
