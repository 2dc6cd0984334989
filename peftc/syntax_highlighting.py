"""Highlighting of specs: a lexer for Pygments (`peftc`, `*.peft`), from the words of the grammar.

Words are cut by peftc's own lexer: what is a keyword, an operator or a number here is so for the
parser. `tools/textmate_grammar.py` makes the grammar of TextMate of the same classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pygments.lexer import Lexer
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Text

from peftc.syntax.lexer import Lexemes
from peftc.syntax.tables import tables

_DECLARES = frozenset({"METHOD", "FORM", "EDIT", "TRAIN", "LET", "PARAM", "FIXED"})
_CONSTANTS = frozenset({"TRUE", "FALSE"})
_PUNCTUATION = frozenset({"LBRACE", "RBRACE", "LPAR", "RPAR", "LSQB", "RSQB", "COMMA", "DOT"})
_OTHERS: Mapping[str, Any] = {
    "COMMENT": Comment.Single,
    "NUMBER": Number,
    "STRING": String.Double,
    "COMPARISON": Operator,
    "SPACE": Text.Whitespace,
    "BAD_NUMBER": Error,
    "OPEN_STRING": Error,
    "STRAY": Error,
}


def token_types() -> Mapping[str, Any]:
    """The type of each terminal of the grammar but names, which depend on what is around them."""
    words = dict.fromkeys(tables().keywords.values(), Keyword)
    declares = {terminal: Keyword.Declaration for terminal in words if terminal in _DECLARES}
    constants = {terminal: Keyword.Constant for terminal in words if terminal in _CONSTANTS}
    signs = {terminal: Operator for terminal in tables().spellings if terminal not in words}
    punctuation = {terminal: Punctuation for terminal in signs if terminal in _PUNCTUATION}
    return {**signs, **punctuation, **_OTHERS, **words, **declares, **constants}


class PeftLexer(Lexer):
    """The language of specs, versions 1 and 2."""

    name: ClassVar[str] = "peftc"
    aliases: ClassVar[Sequence[str]] = ["peft", "peftc"]
    filenames: ClassVar[Sequence[str]] = ["*.peft"]
    mimetypes: ClassVar[Sequence[str]] = ["text/x-peft"]

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, Any, str]]:
        """The words of a text, each with its place and its type."""
        types, lexemes, at = token_types(), Lexemes(text), 0
        terminals = [terminal for terminal in lexemes.types if terminal not in ("SPACE", "COMMENT")]
        number = -1
        for word, terminal in zip(lexemes.words, lexemes.types, strict=True):
            number += terminal not in ("SPACE", "COMMENT")
            if word:
                around = terminals[max(number - 1, 0)] if number else "", terminals[min(number + 1, len(terminals) - 1)]
                yield at, _name_type(*around) if terminal == "NAME" else types[terminal], text[at : at + len(word)]
            at += len(word)


def _name_type(before: str, behind: str) -> Any:
    """The type of a name between two terminals."""
    if before in _DECLARES:
        return Name.Function if before in ("METHOD", "FORM") else Name.Variable
    if behind == "LPAR":
        return Name.Function
    return Name.Attribute if behind == "EQUAL" and before in ("LPAR", "COMMA") else Name
