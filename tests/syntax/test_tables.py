"""The stored tables are those of the grammar, and lex every text as lark does."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lark import Token
from lark.exceptions import UnexpectedToken

from peftc.filesystem import resources
from peftc.syntax.automaton import Automaton
from peftc.syntax.lexer import Lexemes, unknown_terminals, version_of
from peftc.syntax.reducer import Reducer
from tests.syntax.test_fuzz import TEXTS, WORDS
from tools import parser_tables

LEXER = parser_tables.lark(parser=None)
PARSER = parser_tables.lark(parser="lalr", strict=True)
PIECES = st.sampled_from([*WORDS, " ", "\n", "\r", "#c", "\x0b", "\u2028", "é", "1x", "1.5.5", '"a', "“"])
LINES = st.lists(PIECES, max_size=30).map("".join)


def test_the_tables_are_those_of_the_grammar() -> None:
    """Else: `make tables`."""
    assert resources.parser_tables() == parser_tables.text()
    assert json.loads(resources.parser_tables())["states"]


@given(st.one_of(st.text(max_size=40), LINES))
@settings(max_examples=300, deadline=None)
def test_a_text_has_the_words_that_lark_finds(text: str) -> None:
    expected = [(str(token), token.type, token.start_pos, token.line, token.column) for token in LEXER.lex(text)]
    lexemes = Lexemes(text)
    words = zip(lexemes.words[:-1], lexemes.types, map(lexemes.span, range(len(text)), range(len(text))), strict=False)
    actual = [(word, terminal, at.start, at.line, at.column) for word, terminal, at in words if terminal != "SPACE"]
    if not text.startswith("\ufeff"):
        assert actual == expected


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_both_parsers_accept_what_lark_accepts(text: str) -> None:
    """Texts of which some letters are left out, or followed by what does not belong there."""
    for number in range(0, len(text), max(1, len(text) // 25)):
        for changed in (text[:number] + text[number + 3 :], text[:number] + "= " + text[number:], text[:number]):
            expected = accepted_by_lark(changed)
            assert (Reducer(Lexemes(changed)).reduce("spec") is not None) == expected, changed
            assert accepted_by_automaton(changed) == expected, changed


def accepted_by_automaton(text: str) -> bool:
    parser = Automaton.starting("spec")
    return all(parser.feed(token) for token in Lexemes(text).tokens)


def accepted_by_lark(text: str) -> bool:
    parser = PARSER.parse_interactive(start="spec")
    unknown = unknown_terminals(version_of(text))
    try:
        for token in LEXER.lex(text):
            if token.type in unknown and token.isidentifier():  # a word of a later version is a name
                token = Token.new_borrow_pos("NAME", token, token)
            if token.type != "COMMENT":
                parser.feed_token(token)
        parser.feed_eof()
    except UnexpectedToken:
        return False
    return True
