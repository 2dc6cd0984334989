"""Hands every comment to the statement it belongs to, in the order of the text."""

from __future__ import annotations

from bisect import bisect_left

from lark import Token

from peftc.syntax.tokens import Cut


class Comments:
    """The comments of a text and a cursor; asked from the first statement to the last.

    A blank line (or several) above a comment or a statement is kept as an empty string among the comments.
    """

    def __init__(self, words: Cut) -> None:
        self._comments = words.comments
        self._token_starts = [token.start_pos or 0 for token in words.tokens]
        self._next = 0
        self._line = 1  # the last line of what came before

    def above(self, start: int, line: int, first: bool = False) -> tuple[str, ...]:
        """The comments before `start`, which is in `line`; `first` in its block, where a blank line says nothing."""
        lines: list[str] = []
        while (comment := self._before(start)) is not None:
            lines += self._gap(comment.line or 1, first and not lines)
            lines.append(str(comment).rstrip())
        lines += self._gap(line, first and not lines)
        return tuple(lines)

    def inside(self, end: int) -> tuple[str, ...]:
        """The comments before `end`, between the words of a statement."""
        lines: list[str] = []
        while (comment := self._before(end)) is not None:
            lines.append(str(comment).rstrip())
        return tuple(lines)

    def beside(self, end: int, line: int) -> str | None:
        """The comment in `line` after `end`, where no other word is between."""
        self._line = max(self._line, line)
        if self._next >= len(self._comments):
            return None
        comment = self._comments[self._next]
        start = comment.start_pos or 0
        if (
            comment.line != line
            or start < end
            or bisect_left(self._token_starts, end) != bisect_left(self._token_starts, start)
        ):
            return None
        self._next += 1
        return str(comment).rstrip()

    def _before(self, end: int) -> Token | None:
        if self._next < len(self._comments) and (self._comments[self._next].start_pos or 0) < end:
            self._next += 1
            return self._comments[self._next - 1]
        return None

    def _gap(self, line: int, first: bool) -> list[str]:
        blank = line - self._line > 1 and not first
        self._line = max(self._line, line)
        return [""] if blank else []
