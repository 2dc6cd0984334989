"""Formatting, as `peftc fmt` does it."""

from __future__ import annotations

from lsprotocol import types

from peftc.diagnostics import PeftcError
from peftc.language_server.documents import Document
from peftc.syntax.parser import parse_text
from peftc.syntax.printer import print_spec


def format_edits(document: Document) -> list[types.TextEdit] | None:
    """What `peftc fmt` changes in a text, but for ends of lines; None if it has errors."""
    try:
        formatted = print_spec(parse_text(document.text, document.path))
    except PeftcError:
        return None
    return text_edits(document, formatted.replace("\n", end_of_line(document.text)))


def end_of_line(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def text_edits(document: Document, new: str) -> list[types.TextEdit]:
    """The edit that makes a text another one: the lines from the first to the last that differ."""
    old = document.text
    if new == old:
        return []
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    first = _common(before, after)
    last = _common(before[first:][::-1], after[first:][::-1])
    start = sum(map(len, before[:first]))
    end = len(old) - sum(map(len, before[len(before) - last :]))
    replacement = "".join(after[first : len(after) - last])
    return [types.TextEdit(document.positions.between(start, end), replacement)]


def _common(one: list[str], other: list[str]) -> int:
    """How many lines at the beginning are the same."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
