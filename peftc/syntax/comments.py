"""Attaches comments to statements, in the order of the text."""

from __future__ import annotations

from bisect import bisect_left

from lark import Token

from peftc.diagnostics import Span
from peftc.syntax.lexer import TokenStream


class CommentCursor:
    """The comments of a text. Its methods are called from the first statement to the last.

    Blank lines above a comment or a statement become one empty string among the comments.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._comments = stream.comments
        self._starts = [comment.start_pos or 0 for comment in stream.comments]
        self._token_starts = [token.start_pos or 0 for token in stream.tokens]
        self._next = 0
        self._line = 1  # the last line of the previous statement or comment

    def leading(self, at: Span, end: int, first: bool = False) -> tuple[str, ...]:
        """The comments above `at`, and within it before `end`. `first`: at the start of a block."""
        above = self._above(at.start, first)
        above += self._blank_line(at.line, first and not above)
        return (*above, *self.inner(end))

    def inner(self, end: int) -> tuple[str, ...]:
        """The comments before the offset `end`, between the tokens of a statement."""
        return tuple(str(comment).rstrip() for comment in self._take(end))

    def closing(self, end: int, first: bool = False) -> tuple[str, ...]:
        """The comments after the last statement of a block."""
        return tuple(self._above(end, first))

    def trailing(self, at: Span) -> str | None:
        """The comment on the last line of `at`, unless a token stands between."""
        self._line = max(self._line, at.end_line)
        if self._next >= len(self._comments) or self._comments[self._next].line != at.end_line:
            return None
        start = self._starts[self._next]
        if start < at.end or bisect_left(self._token_starts, at.end) != bisect_left(self._token_starts, start):
            return None
        self._next += 1
        return str(self._comments[self._next - 1]).rstrip()

    def _above(self, end: int, first: bool) -> list[str]:
        lines: list[str] = []
        for comment in self._take(end):
            lines += [*self._blank_line(comment.line or 1, first and not lines), str(comment).rstrip()]
        return lines

    def _take(self, end: int) -> tuple[Token, ...]:
        begin, self._next = self._next, bisect_left(self._starts, end, lo=self._next)
        return self._comments[begin : self._next]

    def _blank_line(self, line: int, first: bool) -> list[str]:
        is_blank = line - self._line > 1 and not first
        self._line = max(self._line, line)
        return [""] if is_blank else []
