"""The lexer: text to tokens and comments. It accepts any text; unknown characters become tokens."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lark import Lark, Token
from lark.lark import PostLex

from peftc.diagnostics import Diagnostic, Span
from peftc.filesystem import resources


class _UnusedTerminals(PostLex):
    """Makes Lark keep the terminals that no rule uses: comments and invalid tokens."""

    always_accept = ("COMMENT", "BAD_NUMBER", "OPEN_STRING", "STRAY")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


_LARK = {"lexer": "basic", "start": ["spec", "expression"], "maybe_placeholders": False, "postlex": _UnusedTerminals()}


@cache
def lark_parser() -> Lark:
    """The LALR(1) parser of grammar/peft.lark. A conflict in the grammar raises an exception."""
    return Lark(resources.grammar(), parser="lalr", strict=True, propagate_positions=True, **_LARK)


@cache
def lark_lexer() -> Lark:
    """The terminals alone. `lark_parser().lex` would build a new lexer for every text."""
    return Lark(resources.grammar(), parser=None, **_LARK)


@cache
def keywords() -> dict[str, str]:
    """The keywords, as terminal -> text."""
    terminals = ((t.name, t.pattern.value) for t in lark_parser().terminals if t.pattern.type == "str")
    return {name: text for name, text in terminals if re.fullmatch(r"[a-z]+", text)}


def spelling(terminal: str) -> str:
    """A terminal in a message: `+=`, a name, the end of the text."""
    texts = {t.name: f"`{t.pattern.value}`" for t in lark_parser().terminals if t.pattern.type == "str"}
    classes = {"NUMBER": "a number", "NAME": "a name", "STRING": "a string", "COMPARISON": "a comparison"}
    return (texts | classes).get(terminal, "the end of the text")


_HEADER = re.compile(r"\ufeff?(?:[ \t\f\r\n]|#[^\r\n]*+)*+peft[ \t\f\r\n]+[0-9]")


def begins_as_spec(text: str) -> bool:
    """Whether a text begins, after comments, with `peft` and a number."""
    return _HEADER.match(text) is not None


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a text, ending in `$END`, and its comments."""

    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]


def tokenize(text: str) -> TokenStream:
    """All tokens of `text`. Adjacent unknown characters form one `STRAY` token."""
    text = " " + text[1:] if text.startswith("\ufeff") else text
    runs: list[list[Token]] = []  # of adjacent strays; any other token is alone
    comments: list[Token] = []
    for token in lark_lexer().lex(text):
        last = runs[-1][-1] if runs else None
        if token.type == "COMMENT":
            comments.append(token)
        elif last and last.type == token.type == "STRAY" and last.end_pos == token.start_pos:
            runs[-1].append(token)
        else:
            runs.append([token])
    return TokenStream((*map(_join, runs), _end(text)), tuple(comments))


def _join(run: Sequence[Token]) -> Token:
    first, last = run[0], run[-1]
    at = (first.start_pos, first.line, first.column, last.end_line, last.end_column, last.end_pos)
    return Token(first.type, "".join(run), *at)


def _end(text: str) -> Token:
    """`$END`, directly after the last character that is not white space."""
    at = len(text.rstrip())
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return Token("$END", "", at, line, column, line, column, at)


def span_of(token: Token) -> Span:
    positions = (token.start_pos, token.end_pos, token.line, token.column, token.end_line, token.end_column)
    return Span(*(position or 0 for position in positions))


def excerpt(text: str, limit: int = 30) -> str:
    """At most `limit` characters of untrusted text, without line breaks and control characters."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: limit + 1])
    return safe if len(text) <= limit else safe[:limit] + "…"


# Errors within a token: unknown characters, unterminated strings, malformed numbers

# Characters from papers and word processors: the terminal and the text that they stand for.
_LOOKALIKES = {
    **dict.fromkeys("×·⊙∗", ("STAR", "*")),
    **dict.fromkeys("−–—", ("MINUS", "-")),
    "÷": ("SLASH", "/"),
    "≤": ("COMPARISON", "<="),
    "≥": ("COMPARISON", ">="),
    "≠": ("COMPARISON", "!="),
    "←": ("EQUAL", "="),
    "…": ("DOT_DOT", ".."),
}
_HELP = {
    ":": "write a range of layers as `0..5` (both ends included), an argument as `r=8`",
    ";": "statements and equations need no separator",
    "'": 'use double quotes: "file.peft"',
    "“": 'use straight quotes: "file.peft"',
    "”": 'use straight quotes: "file.peft"',
    "@": "there is no matrix product; call a form such as `lora(x, r=8)` with its input",
    "\xa0": "this is a no-break space; write an ordinary one",
}


def repair_tokens(tokens: Sequence[Token]) -> tuple[list[Token], list[Diagnostic]]:
    """The tokens with lexical errors repaired (or removed), and a diagnostic for each."""
    repaired: list[Token] = []
    errors: list[Diagnostic] = []
    for token in tokens:
        text = str(token)
        match token.type:
            case "STRAY":
                replacement = _LOOKALIKES.get(text)
                help_ = f"did you mean `{replacement[1]}`?" if replacement else _HELP.get(text[0])
                error = ("P003", f"unknown character `{excerpt(text)}`", help_)
                replacement = ("DOT_DOT", "..") if text == ":" else replacement
            case "OPEN_STRING":
                error = ("P004", "this string is never closed", 'a string ends on its line with `"`')
                replacement = ("STRING", f'{text}"')
            case "BAD_NUMBER":
                help_ = "a number is digits, at most one point and one of `%`, `K`, `M`, `B`; names begin with a letter"
                error = ("P005", f"`{excerpt(text)}` is not a number", help_)
                replacement = ("NUMBER", "1")
            case _:
                repaired.append(token)
                continue
        code, message, help_ = error
        errors.append(Diagnostic(code, message, span_of(token), help=help_))
        repaired += [Token.new_borrow_pos(*replacement, token)] if replacement else []
    return repaired, errors


class CommentCursor:
    """The comments of a text, read in its order. Blank lines become one empty string each."""

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
