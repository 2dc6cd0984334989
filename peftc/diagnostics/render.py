"""Diagnostics as people read them: the message, the line it is about, and what can be done.

error[P201]: `layer[*].attn.croos` matches nothing in facebook/bart-large
  --> mam.peft:4:28
   |
 4 |     edit prefix at layer[*].attn.croos { … }
   |                                  ^^^^^ no such site under `layer[*].attn`
   = help: did you mean `cross`?
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TextIO

from peftc.diagnostics.diagnostic import Diagnostic, Source, printable
from peftc.diagnostics.span import Span

_WIDTH = 160  # characters of a source line that are shown
_BOLD, _RED, _YELLOW, _BLUE, _RESET = "\033[1m", "\033[1;31m", "\033[1;33m", "\033[1;34m", "\033[0m"


def render_text(diagnostics: Iterable[Diagnostic], color: bool = False) -> str:
    """All of them, with a blank line between."""
    return "\n".join("".join(f"{line}\n" for line in _lines(found, _Paint(color))) for found in diagnostics)


def wants_color(stream: TextIO) -> bool:
    """A terminal, unless NO_COLOR (no-color.org) is set."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


class _Paint:
    def __init__(self, color: bool) -> None:
        self._color = color

    def __call__(self, text: str, ansi: str) -> str:
        return f"{ansi}{text}{_RESET}" if self._color and text else text


def _lines(found: Diagnostic, paint: _Paint) -> Iterator[str]:
    tone = _RED if found.severity == "error" else _YELLOW
    yield f"{paint(f'{found.severity}[{found.code}]', tone)}{paint(f': {printable(found.message)}', _BOLD)}"
    pad = " "
    if found.source and found.span:
        pad = " " * (len(str(found.span.line)) + 1)
        yield from _snippet(found.source, found.span, found.label, pad, paint, tone)
    elif found.source:
        yield f"{pad}{paint('-->', _BLUE)} {printable(found.source.path)}"
    for note in found.notes:
        yield f"{pad} {paint('=', _BLUE)} {paint('note', _BOLD)}: {printable(note)}"
    if found.help:
        yield f"{pad} {paint('=', _BLUE)} {paint('help', _BOLD)}: {printable(found.help)}"


def _snippet(source: Source, span: Span, label: str, pad: str, paint: _Paint, tone: str) -> Iterator[str]:
    """The first line of the span, underlined."""
    lines = _split(source.text)
    line = lines[span.line - 1].rstrip("\r") if span.line <= len(lines) else ""
    start = min(span.column - 1, len(line))
    end = span.end_column - 1 if span.end_line == span.line else len(line)
    end = max(start + 1, min(end, len(line) + 1))
    shown, start, end = _window(line, start, end)
    marks = " " * _cells(shown[:start]) + "^" * max(1, _cells(shown[start:end]))
    bar = paint("|", _BLUE)
    yield f"{pad}{paint('-->', _BLUE)} {printable(source.path)}:{span.line}:{span.column}"
    yield f"{pad} {bar}"
    yield f" {paint(str(span.line), _BLUE)} {bar} {shown}".rstrip()
    yield f"{pad} {bar} {paint(f'{marks} {printable(label)}'.rstrip(), tone)}"


@lru_cache(maxsize=8)
def _split(text: str) -> list[str]:
    """The lines of a text, which many messages may be about."""
    return text.split("\n")


def _window(line: str, start: int, end: int) -> tuple[str, int, int]:
    """A line fit for the screen: no control characters, and of a long one the part around the span."""
    first = max(0, min(start - _WIDTH // 3, len(line) - _WIDTH))
    cut = "".join(char if char.isprintable() else " " for char in line[first : first + _WIDTH])
    left, right = "…" if first else "", "…" if first + _WIDTH < len(line) else ""
    return left + cut + right, start - first + len(left), min(end - first, len(cut) + 1) + len(left)


def _cells(text: str) -> int:
    """Columns of a terminal that `text` takes."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
