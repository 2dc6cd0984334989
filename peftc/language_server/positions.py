"""Offsets of a text as positions of the protocol, and back.

A position is a line and a column, both from 0. A line ends with CR LF, LF or CR. A column counts
the units of an encoding: UTF-16, if the client does not prefer another.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from lsprotocol.types import Position, PositionEncodingKind, Range

from peftc.diagnostics import Span

_LINE_END = re.compile(r"\r\n|\n|\r")
_BYTES = {  # of a unit, and the encoding
    PositionEncodingKind.Utf8.value: (1, "utf-8"),
    PositionEncodingKind.Utf16.value: (2, "utf-16-le"),
    PositionEncodingKind.Utf32.value: (4, "utf-32-le"),
}


class Positions:
    """The positions of a text. `encoding`: a `PositionEncodingKind`."""

    def __init__(self, text: str, encoding: str = PositionEncodingKind.Utf16.value) -> None:
        self.text = text
        self._bytes, self._encoding = _BYTES[encoding]

    @cached_property
    def _lines(self) -> list[tuple[int, int]]:
        """Where each line begins, and where its characters end."""
        ends = [(match.start(), match.end()) for match in _LINE_END.finditer(self.text)]
        starts = [0, *(end for _, end in ends)]
        return list(zip(starts, [*(start for start, _ in ends), len(self.text)], strict=True))

    @cached_property
    def _is_ascii(self) -> bool:
        return self.text.isascii()

    def _units(self, text: str) -> int:
        return len(text) if self._is_ascii else len(text.encode(self._encoding, "surrogatepass")) // self._bytes

    def position(self, offset: int) -> Position:
        """The position of an offset; of one within a line end, the end of the line."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._lines, offset, key=lambda ends: ends[0]) - 1
        start, end = self._lines[line]
        return Position(line, self._units(self.text[start : min(offset, end)]))

    def offset(self, position: Position) -> int:
        """The offset of a position: behind a line its end, within a character its start."""
        if position.line >= len(self._lines):
            return len(self.text)
        start, end = self._lines[max(position.line, 0)]
        if self._is_ascii:
            return min(start + max(position.character, 0), end)
        units = 0
        for offset in range(start, end):
            units += self._units(self.text[offset])
            if units > position.character:
                return offset
        return end

    def range(self, span: Span | None) -> Range:
        """The range of a span; without one, the start of the text."""
        start, end = (0, 0) if span is None else (span.start, span.end)
        return self.between(start, end)

    def between(self, start: int, end: int) -> Range:
        """The range between two offsets."""
        return Range(self.position(start), self.position(end))
