"""Diagnostics for people, and the choice of a format. The span is underlined in its line:

error[P201]: `layer[*].attn.croos` matches nothing in facebook/bart-large
  --> mam.peft:4:28
   |
 4 |     edit prefix at layer[*].attn.croos { … }
   |                                  ^^^^^ no such site under `layer[*].attn`
   = help: did you mean `cross`?
"""

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, TextIO

from peftc.diagnostics.diagnostic import Diagnostic, Source, Span, printable
from peftc.diagnostics.formats.report import Report

_WIDTH = 160  # most characters of a source line
_ASCII = re.compile(r"[\x00-\x7f]+")
_BOLD, _RED, _YELLOW, _BLUE, _RESET = "\033[1m", "\033[1;31m", "\033[1;33m", "\033[1;34m", "\033[0m"


FOR_PEOPLE = ("text", "concise")
FORMATS = (*FOR_PEOPLE, "json", "jsonl", "github", "gitlab", "sarif", "junit")


def render(report: Report, output_format: str, stream: TextIO, version: str) -> str:
    """A report in one of `FORMATS`; text is for `stream`. `version`: of peftc."""
    match output_format:
        case "text":
            return render_text(report.diagnostics, wants_color(stream))
        case "concise":
            return render_concise(report)
        case "json" | "jsonl":
            return getattr(_module("records"), f"render_{output_format}")(report.diagnostics)
        case "github":
            return _module("github").render_github(report.diagnostics)
        case "sarif":
            return _module("sarif").render_sarif(report, version)
        case _:
            return getattr(_module(output_format), f"render_{output_format}")(report)


def _module(name: str) -> Any:
    """A module of a format, imported when it is needed."""
    return import_module(f"peftc.diagnostics.formats.{name}")


def render_concise(report: Report) -> str:
    """A line for each diagnostic: `path:line:column: error[code]: message; help`."""
    return "".join(_concise(report, diagnostic) for diagnostic in report.diagnostics)


def _concise(report: Report, diagnostic: Diagnostic) -> str:
    at = f":{diagnostic.span.line}:{diagnostic.span.column}" if diagnostic.source and diagnostic.span else ""
    parts = [diagnostic.message, *diagnostic.notes, *([diagnostic.help] if diagnostic.help else [])]
    head = f"{printable(report.path(diagnostic))}{at}: {diagnostic.severity}[{diagnostic.code}]"
    return f"{head}: {'; '.join(map(printable, parts))}\n"


def render_text(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """Diagnostics as text, separated by blank lines."""
    painter = _Painter(color)
    return "\n".join("".join(f"{line}\n" for line in painter.lines(diagnostic)) for diagnostic in diagnostics)


def wants_color(stream: TextIO) -> bool:
    """Whether `stream` is a terminal or FORCE_COLOR is set, and NO_COLOR (no-color.org) is not."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or is_terminal(stream)


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that can move its cursor and has colours."""
    return os.environ.get("TERM") != "dumb" and stream.isatty()


class _Painter:
    def __init__(self, color: bool) -> None:
        self._color = color

    def lines(self, diagnostic: Diagnostic) -> Iterator[str]:
        tone = _RED if diagnostic.severity == "error" else _YELLOW
        head = self._paint(f"{diagnostic.severity}[{diagnostic.code}]", tone)
        yield head + self._paint(f": {printable(diagnostic.message)}", _BOLD)
        pad = " "
        if diagnostic.source and diagnostic.span:
            pad = " " * (len(str(diagnostic.span.line)) + 1)
            yield from self._snippet(diagnostic.source, diagnostic.span, diagnostic.label, pad, tone)
        elif diagnostic.source and diagnostic.source.path not in diagnostic.message:
            yield f"{pad}{self._paint('-->', _BLUE)} {printable(diagnostic.source.path)}"
        for place in diagnostic.related:
            pad = " " * (len(str(place.span.line)) + 1)
            yield from self._snippet(place.source, place.span, place.message, pad, _BLUE)
        for title, text in [("note", note) for note in diagnostic.notes] + [("help", diagnostic.help or "")]:
            if text or title == "note":
                yield f"{pad} {self._paint('=', _BLUE)} {self._paint(title, _BOLD)}: {printable(text)}"

    def _snippet(self, source: Source, span: Span, label: str, pad: str, tone: str) -> Iterator[str]:
        """The first line of the span, with the span underlined."""
        lines = _split(source.text)
        line = lines[span.line - 1].rstrip("\r") if span.line <= len(lines) else ""
        start = min(span.column - 1, len(line))
        end = span.end_column - 1 if span.end_line == span.line else len(line)
        end = max(start + 1, min(end, len(line) + 1))
        # Of a long line, the part around the span; without control characters.
        first = max(0, min(start - _WIDTH // 3, len(line) - _WIDTH))
        part = line[first : first + _WIDTH]
        part = part if part.isprintable() else "".join(char if char.isprintable() else " " for char in part)
        left, right = "…" if first else "", "…" if first + _WIDTH < len(line) else ""
        start, end = start - first + len(left), min(end - first, len(part) + 1) + len(left)
        excerpt = left + part + right
        marks = " " * _cells(excerpt[:start]) + "^" * max(1, _cells(excerpt[start:end]))
        bar = self._paint("|", _BLUE)
        yield f"{pad}{self._paint('-->', _BLUE)} {printable(source.path)}:{span.line}:{span.column}"
        yield f"{pad} {bar}"
        yield f" {self._paint(str(span.line), _BLUE)} {bar} {excerpt}".rstrip()
        yield f"{pad} {bar} {self._paint(f'{marks} {printable(label)}'.rstrip(), tone)}"

    def _paint(self, text: str, ansi: str) -> str:
        return f"{ansi}{text}{_RESET}" if self._color and text else text


@lru_cache(maxsize=8)
def _split(text: str) -> list[str]:
    return text.split("\n")


def _cells(text: str) -> int:
    """The number of terminal columns of `text`."""
    others = _ASCII.sub("", text)
    widths = (0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in others)
    return len(text) - len(others) + sum(widths)
