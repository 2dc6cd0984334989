"""Error recovery: parsing continues after a syntax error, so that one run reports all of them.

First a repair of one token is tried: delete the unexpected token, insert one before it, or
replace it. The best repair is the one after which most of the following tokens parse. If none
helps, panic mode skips tokens up to one that begins a statement or closes a block, and unwinds the
parser's stack to a state that accepts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lark import Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from peftc.diagnostics.suggestions import nearest
from peftc.syntax.error_rules import ASSIGNMENTS
from peftc.syntax.lexer import keywords

_LOOKAHEAD = 16  # tokens by which a repair is judged
_MIN_PROGRESS = 3  # tokens that must parse after a repair
_STATEMENTS = frozenset({"METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET"})
_BRACES = {"LBRACE": 1, "RBRACE": -1}
_INVALID = frozenset({"BAD_NUMBER", "OPEN_STRING", "STRAY", "COMMENT"})


@dataclass(frozen=True)
class Resumption:
    """The parser after recovery, and the index of its next token."""

    parser: InteractiveParser
    at: int


def feed(parser: InteractiveParser, token: Token) -> bool:
    """Feeds `token` and returns True, or returns False if it is unexpected."""
    try:
        parser.feed_token(token)
    except UnexpectedToken:
        return False
    return True


def accepted_terminals(parser: InteractiveParser) -> frozenset[str]:
    return frozenset(parser.accepts()) - _INVALID


def resume(parser: InteractiveParser, tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Resumption | None:
    """Recovers from the unexpected `tokens[at]`; None if no token is left to continue at."""
    missing_braces = -sum(_BRACES.get(token.type, 0) for token in tokens[at:])  # `}` that is missing before `at`
    if tokens[at].type in _STATEMENTS and missing_braces > 0:
        return _skip(parser, tokens, at + 1)
    return _repair(parser, tokens, at, accepts) or _skip(parser, tokens, at)


def _copy(parser: InteractiveParser) -> InteractiveParser:
    return parser.copy(deepcopy_values=False)


def _repair(parser: InteractiveParser, tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Resumption | None:
    best: Resumption | None = None
    best_score = -1
    for inserted in (None, *_insertions(tokens[at], accepts)):
        for skip in (0, 1):
            if (inserted is None and not skip) or at + skip >= len(tokens):
                continue
            trial = _copy(parser)
            if inserted and not feed(trial, Token.new_borrow_pos(inserted, "", tokens[at])):
                continue
            probe, window = _copy(trial), tokens[at + skip : at + skip + _LOOKAHEAD]
            progress = next((number for number, token in enumerate(window) if not feed(probe, token)), len(window))
            score = 2 * progress - skip
            if progress >= min(_MIN_PROGRESS, len(tokens) - at - skip) and score > best_score:
                best, best_score = Resumption(trial, at + skip), score
    return best


def _insertions(token: Token, accepts: frozenset[str]) -> list[str]:
    """The terminals to try, first the keyword that `token` resembles."""
    spellings = {text: terminal for terminal, text in keywords().items() if terminal in accepts}
    suggestion = spellings.get(nearest(str(token), spellings) or "")
    return sorted(accepts - {"$END"}, key=lambda terminal: (terminal != suggestion, terminal))


def _skip(parser: InteractiveParser, tokens: Sequence[Token], at: int) -> Resumption | None:
    while at < len(tokens):
        token = tokens[at]
        if token.type == "LBRACE":
            at = _closing_brace(tokens, at) + 1
            continue
        equation = _starts_equation(tokens, at)
        if token.type in _STATEMENTS or token.type == "RBRACE" or equation:
            # The assignment must fit, too: a name alone would continue the expression before it.
            unwound = _unwind(parser, tokens[at : at + 1 + equation])
            if unwound:
                return Resumption(unwound, at)
        at += 1
    return None


def _closing_brace(tokens: Sequence[Token], at: int) -> int:
    """The index of the brace that closes the one at `at`, or of the last token."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += _BRACES.get(tokens[index].type, 0)
        if not depth:
            return index
    return len(tokens) - 1


def _starts_equation(tokens: Sequence[Token], at: int) -> bool:
    """Whether a line begins here with a name and an assignment."""
    first_of_line = at == 0 or tokens[at - 1].end_line != tokens[at].line
    return first_of_line and tokens[at].type == "NAME" and tokens[at + 1].type in ASSIGNMENTS


def _unwind(parser: InteractiveParser, tokens: Sequence[Token]) -> InteractiveParser | None:
    """The parser with the least of its stack removed so that it accepts `tokens`."""
    trial = _copy(parser)
    while trial.parser_state.value_stack:
        probe = _copy(trial)
        if all(feed(probe, token) for token in tokens):
            return trial
        trial.parser_state.state_stack.pop()
        trial.parser_state.value_stack.pop()
    return None
