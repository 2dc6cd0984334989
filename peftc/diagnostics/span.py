"""Where something stands in a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """A half-open range of a text; lines and columns count from 1, offsets from 0 (characters).

    `end_line`/`end_column` name the position just after the last character.
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


NOWHERE = Span(0, 0, 1, 1, 1, 1)
