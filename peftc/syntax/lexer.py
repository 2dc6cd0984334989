"""The lexer: text to tokens and comments. It accepts any text; unknown characters become tokens."""

import os
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, repeat
from typing import NamedTuple

from peftc.diagnostics import Span
from peftc.syntax.tables import END, tables


class Token(NamedTuple):
    """A word of the text, and its terminal of the grammar."""

    type: str
    text: str
    span: Span

    def __str__(self) -> str:
        return self.text


def keywords() -> dict[str, str]:
    """The keywords, as terminal -> text."""
    return {terminal: text for text, terminal in tables().keywords.items()}


def spelling(terminal: str) -> str:
    """A terminal in a message: `+=`, a name, the end of the text."""
    texts = {name: f"`{text}`" for name, text in tables().spellings.items()}
    classes = {"NUMBER": "a number", "NAME": "a name", "STRING": "a string", "COMPARISON": "a comparison"}
    return (texts | classes).get(terminal, "the end of the text")


_new = tuple.__new__  # of named tuples, whose own constructor takes twice as long
_HEADER = re.compile(r"\ufeff?(?:[ \t\f\r\n]|#[^\r\n]*+)*+peft[ \t\f\r\n]+([0-9]+)")
VERSIONS = ("1", "2")
OF_VERSION_2 = frozenset(
    {"FORM", "REQUIRE", "PARAM", "FIXED", "COMMON", "SAVE", "MOVED", "IF", "WHERE", "IN", "AT_SIGN"}
)
CLOSING = {"LBRACE": "RBRACE", "LPAR": "RPAR", "LSQB": "RSQB"}  # brackets
ONE_VALUE = "with `peft 2` on the first line, a list has one value for each layer"
NEED_VERSION_2 = "write `peft 2` on the first line"


def begins_as_spec(text: str) -> bool:
    """Whether a text begins, after comments, with `peft` and a number."""
    return _HEADER.match(text) is not None


def is_text(spec: str | os.PathLike[str]) -> bool:
    """Whether an argument is the text of a spec; its first line may be missing."""
    is_str = isinstance(spec, str)
    return is_str and (not spec or "\n" in spec or spec.lstrip().startswith("peft ") or _has_brace(spec))


def _has_brace(path: str) -> bool:
    """Whether a path that leads nowhere has `{`, as texts have."""
    return "{" in path and not os.path.exists(path)


def unknown_terminals(version: str | None) -> frozenset[str]:
    """The terminals that a version of the language does not have."""
    return OF_VERSION_2 if version == "1" else frozenset()


def version_of(text: str) -> str | None:
    """The version in the header of a spec; None for a text without one, such as an expression."""
    match = _HEADER.match(text)
    return match[1] if match is not None else None


class Lexemes:
    """A text cut into words, of which each has the same number in parallel lists.

    Space and comments are words, too, so that one ends where the next one begins. The last word is
    `$END`, directly after the last character that is not white space.
    """

    def __init__(self, text: str) -> None:
        text = " " + text[1:] if text.startswith("\ufeff") else text
        words = tables().lexer.findall(text)
        self.version = version_of(text)
        terminals = _terminals_of(words, unknown_terminals(self.version))
        self.words: list[str] = [*words, ""]
        self.types: list[str] = [*map(terminals.__getitem__, words), END]
        self._starts = [*accumulate(map(len, words), initial=0), len(text)]
        self._lines = [*accumulate(map(str.count, words, repeat("\n")), initial=1)]
        self._line_starts = [0, *accumulate((len(line) + 1 for line in text.split("\n")), initial=0)]
        at = len(text.rstrip())
        line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
        self._end = Span(at, at, line, column, line, column)

    def span(self, first: int, last: int) -> Span:
        """The place of some words."""
        starts, lines = self._starts, self._lines
        start, end, line, end_line = starts[first], starts[last + 1], lines[first], lines[last]
        begins = self._line_starts
        return _new(Span, (start, end, line, start - begins[line] + 1, end_line, end - begins[end_line] + 1))

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """The words that are neither space nor comments; adjacent unknown characters are one."""
        ignored = tables().ignored | {"COMMENT"}
        runs: list[list[int]] = []
        for number, terminal in enumerate(self.types[:-1]):
            if terminal in ignored:
                continue
            if terminal == "STRAY" and runs and runs[-1][-1] == number - 1 and self.types[number - 1] == "STRAY":
                runs[-1].append(number)
            else:
                runs.append([number])
        return (*(self._token(run[0], run[-1]) for run in runs), Token(END, "", self._end))

    @cached_property
    def comments(self) -> tuple[Token, ...]:
        return tuple(self._token(at, at) for at, terminal in enumerate(self.types) if terminal == "COMMENT")

    @cached_property
    def token_starts(self) -> list[int]:
        """The offsets of the words that are neither space nor comments."""
        ignored = tables().ignored | {"COMMENT"}
        starts = zip(self._starts, self.types[:-1], strict=False)
        return [*(start for start, terminal in starts if terminal not in ignored), self._end.start]

    def _token(self, first: int, last: int) -> Token:
        return Token(self.types[first], "".join(self.words[first : last + 1]), self.span(first, last))


def _terminals_of(words: Sequence[str], unknown: frozenset[str]) -> dict[str, str]:
    """The terminal of each word, which its text decides. `unknown`: those of a later version."""
    known = {word: terminal for terminal, word in tables().spellings.items() if terminal not in unknown}
    matches = ((word, tables().classifier.match(word)) for word in {*words} if word not in known)
    return {**known, **{word: match.lastgroup or "" for word, match in matches if match}}


def excerpt(text: str, limit: int = 30) -> str:
    """At most `limit` characters of untrusted text, without line breaks and control characters."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: limit + 1])
    return safe if len(text) <= limit else safe[:limit] + "…"


class CommentCursor:
    """The comments of a text, read in its order. Blank lines become one empty string each."""

    def __init__(self, lexemes: Lexemes) -> None:
        self._lexemes = lexemes
        self._comments = lexemes.comments
        self._starts = [comment.span.start for comment in lexemes.comments]
        self._next = 0
        self._next_start = self._starts[0] if self._starts else sys.maxsize
        self._line = 1  # the last line of the previous statement or comment

    def leading(self, at: Span, end: int, first: bool = False) -> tuple[str, ...]:
        """The comments above `at`, and within it before `end`. `first`: at the start of a block."""
        if self._next_start >= end:
            return tuple(self._blank_line(at.line, first))
        above = self._above(at.start, first)
        above += self._blank_line(at.line, first and not above)
        return (*above, *self.inner(end))

    def inner(self, end: int) -> tuple[str, ...]:
        """The comments before the offset `end`, between the tokens of a statement."""
        return tuple([comment.text.rstrip() for comment in self._take(end)])

    def closing(self, end: int, first: bool = False) -> tuple[str, ...]:
        """The comments after the last statement of a block."""
        return () if self._next_start >= end else tuple(self._above(end, first))

    def trailing(self, at: Span) -> str | None:
        """The comment on the last line of `at`, unless a token stands between."""
        if at.end_line > self._line:
            self._line = at.end_line
        if self._next == len(self._comments) or self._comments[self._next].span.line != at.end_line:
            return None
        tokens = self._lexemes.token_starts
        start = self._next_start
        if start < at.end or bisect_left(tokens, at.end) != bisect_left(tokens, start):
            return None
        (comment,) = self._take(start + 1)
        return comment.text.rstrip()

    def _above(self, end: int, first: bool) -> list[str]:
        lines: list[str] = []
        for comment in self._take(end):
            lines += [*self._blank_line(comment.span.line, first and not lines), comment.text.rstrip()]
        return lines

    def _take(self, end: int) -> tuple[Token, ...]:
        if self._next_start >= end:
            return ()
        begin, self._next = self._next, bisect_left(self._starts, end, lo=self._next)
        self._next_start = self._starts[self._next] if self._next < len(self._starts) else sys.maxsize
        return self._comments[begin : self._next]

    def _blank_line(self, line: int, first: bool) -> list[str]:
        is_blank = line - self._line > 1 and not first
        if line > self._line:
            self._line = line
        return [""] if is_blank else []
