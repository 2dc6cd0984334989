"""Cuts a text into the words of the language; every text can be cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lark import Lark, Token
from lark.lark import PostLex

from peftc.diagnostics import Span
from peftc.filesystem import resources


class _KeepAll(PostLex):
    """Tells Lark to keep the terminals that no rule uses: the comments, and what is wrong."""

    always_accept = ("COMMENT", "BAD_NUMBER", "OPEN_STRING", "STRAY")

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


@cache
def language() -> Lark:
    """The LALR(1) tables of grammar/peft.lark; a conflict in it is an exception here."""
    return Lark(
        resources.grammar(),
        parser="lalr",
        lexer="basic",
        strict=True,
        start=["spec", "expression"],
        postlex=_KeepAll(),
        propagate_positions=True,
        maybe_placeholders=False,
    )


@cache
def words() -> Lark:
    """The words of the grammar alone. The parser would make a new lexer for every text."""
    return Lark(resources.grammar(), parser=None, lexer="basic", start=["spec", "expression"], postlex=_KeepAll())


@cache
def keywords() -> dict[str, str]:
    """The reserved words, as terminal name -> text."""
    terminals = ((t.name, t.pattern.value) for t in language().terminals if t.pattern.type == "str")
    return {name: text for name, text in terminals if re.fullmatch(r"[a-z]+", text)}


def spelling(terminal: str) -> str:
    """How messages name a terminal: `+=`, a name, the end of the text."""
    for known in language().terminals:
        if known.name == terminal and known.pattern.type == "str":
            return f"`{known.pattern.value}`"
    return {"NUMBER": "a number", "NAME": "a name", "STRING": "a string", "COMPARISON": "a comparison"}.get(
        terminal, "the end of the text"
    )


_BEGINNING = re.compile(r"\ufeff?(?:[ \t\f\r\n]|#[^\r\n]*+)*+peft[ \t\f\r\n]+[0-9]")


def begins_as_spec(text: str) -> bool:
    """Whether the first words of a text, comments aside, are `peft` and a number."""
    return _BEGINNING.match(text) is not None


@dataclass(frozen=True)
class Cut:
    """The tokens of a text, an `$END` last, and the comments between them."""

    tokens: tuple[Token, ...]
    comments: tuple[Token, ...]


def cut(text: str) -> Cut:
    """All tokens of `text`, unknown characters among them as `STRAY` (neighbours in one token)."""
    text = " " + text[1:] if text.startswith("\ufeff") else text
    tokens: list[Token] = []
    comments: list[Token] = []
    strays: list[Token] = []
    for token in words().lex(text):
        if strays and not (token.type == "STRAY" and strays[-1].end_pos == token.start_pos):
            tokens.append(_joined(strays))
            strays = []
        if token.type == "STRAY":
            strays.append(token)
        else:
            (comments if token.type == "COMMENT" else tokens).append(token)
    tokens += [_joined(strays)] if strays else []
    tokens.append(_end(text))
    return Cut(tuple(tokens), tuple(comments))


def _joined(strays: Sequence[Token]) -> Token:
    first, last = strays[0], strays[-1]
    at = (first.start_pos, first.line, first.column, last.end_line, last.end_column, last.end_pos)
    return Token(first.type, "".join(strays), *at)


def _end(text: str) -> Token:
    """The end stands just behind the last character that is not layout."""
    at = len(text.rstrip())
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return Token("$END", "", at, line, column, line, column, at)


def span_of(token: Token) -> Span:
    """The place of a token that came out of `cut`."""
    places = (token.start_pos, token.end_pos, token.line, token.column, token.end_line, token.end_column)
    start, end, line, column, end_line, end_column = (place or 0 for place in places)
    return Span(start, end, line, column, end_line, end_column)
