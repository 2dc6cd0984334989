"""The trees of a text that may have errors, and what may stand at a place in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property

from peftc.diagnostics import NOWHERE
from peftc.syntax.automaton import Automaton, Tree, Value, deeper_than, spliced
from peftc.syntax.errors.lexical import repair_tokens
from peftc.syntax.errors.recovery import accepted_terminals, resume
from peftc.syntax.lexer import Lexemes, Token, unknown_terminals
from peftc.syntax.tables import END, tables

_MOST_RECOVERIES = 40  # the time of each grows with the rest of the text
_DEEPEST = 100  # brackets around a place; parsing time grows with depth
_MOST_LEVELS = 200  # of a tree, so that code that walks it may recurse
_BRACKETS = {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}


class PartialText:
    """A text as an editor has it. Nothing raises, whatever the text is."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def lexemes(self) -> Lexemes:
        return Lexemes(self.text)

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """Its words, without comments; those at which the lexer fails are left out or repaired."""
        return tuple(repair_tokens(self.lexemes.tokens)[0])

    @cached_property
    def trees(self) -> tuple[Value, ...]:
        """The parse trees in order: one if the text has no errors."""
        parser, at = parse_some(self.tokens, self.lexemes.version)
        values = (tuple(words((one,))) if deeper_than(one, _MOST_LEVELS) else (one,) for one in parser.values)
        return (*(value for some in values for value in some), *self.tokens[at:])

    def token_at(self, offset: int) -> Token | None:
        """The word at a place, or the one that ends there."""
        last = bisect_right(self.tokens, offset, key=lambda token: token.span.start) - 1
        around = [self.tokens[i] for i in (last, last - 1) if i >= 0]
        touching = [token for token in around if token.text and offset <= token.span.end]
        return next((token for token in touching if is_word(token)), touching[0] if touching else None)

    def comment_at(self, offset: int) -> Token | None:
        """The comment that a place is in."""
        comments = self.lexemes.comments
        last = bisect_right(comments, offset, key=lambda token: token.span.start) - 1
        inside = last >= 0 and comments[last].span.start < offset <= comments[last].span.end
        return comments[last] if inside else None

    def before(self, offset: int) -> Place:
        """What stands before a place, without the word that is there."""
        word = self.token_at(offset)
        start = word.span.start if word is not None and is_word(word) and word.span.start < offset else offset
        tokens = [token for token in self.tokens if token.type != END and token.span.end <= start]
        return Place(tokens, self.lexemes.version, self.text[start:offset])


def is_word(token: Token) -> bool:
    """Whether a word is a name or a keyword."""
    return token.type == "NAME" or token.type in tables().keywords.values()


def parse_some(tokens: Sequence[Token], version: str | None) -> tuple[Automaton, int]:
    """The parser behind as many words as it can take, and their number."""
    parser, at, recoveries, depth = Automaton.starting("spec"), 0, 0, 0
    following = [*tokens, Token(END, "", NOWHERE)]  # recovery looks for the end of the text
    while at < len(tokens):
        token = tokens[at]
        depth = max(depth + _BRACKETS.get(token.type, 0), 0)
        if depth > _DEEPEST:
            break
        if parser.feed(token):
            at += 1
            continue
        recoveries += 1
        accepts = accepted_terminals(parser, version)
        resumption = None if recoveries > _MOST_RECOVERIES else resume(parser, following, at, accepts)
        if resumption is None:
            break
        parser, at = resumption
    return parser, min(at, len(tokens))


class Place:
    """A place in a text, between two words.

    Attributes:
        tokens: the words before it.
        version: of the language.
        prefix: the beginning of the word that is being written there.
    """

    def __init__(self, tokens: Sequence[Token], version: str | None, prefix: str = "") -> None:
        self.tokens, self.version, self.prefix = tokens, version, prefix

    @cached_property
    def _parser(self) -> Automaton:
        return parse_some(self.tokens, self.version)[0]

    @cached_property
    def accepts(self) -> frozenset[str]:
        """The terminals that may follow."""
        return accepted_terminals(self._parser, self.version) - unknown_terminals(self.version)

    @cached_property
    def values(self) -> Sequence[Value]:
        """What has begun before and is not complete: trees, and words between them."""
        return [part for value in self._parser.values for part in spliced(value)]

    def open_words(self) -> Iterator[tuple[int, Token]]:
        """The words of what has begun, the last one first, with their numbers in `values`."""
        for number in range(len(self.values) - 1, -1, -1):
            value = self.values[number]
            if isinstance(value, Token):
                yield number, value


def words(values: Sequence[Value]) -> Iterator[Token]:
    """All words of trees, in order, without those that recovery has inserted."""
    stack = list(reversed(values))
    while stack:
        value = stack.pop()
        if isinstance(value, Tree):
            stack.extend(reversed(value.children))
        elif value.text:
            yield value
