"""Goes on after a syntax error, so that one run reports them all.

First a repair of one word is tried: leave the unexpected token out, put one in before it, or put another in its place,
whichever lets most of the following tokens pass. Where none helps, tokens are skipped up to one that can begin a
statement (or close a block), and the parser is unwound to a state that takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lark import Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from peftc.diagnostics.suggestions import nearest
from peftc.syntax.tokens import keywords

_AHEAD = 16  # tokens that a repair is judged by
_ENOUGH = 3  # tokens that must pass for a repair to count as one
_STARTS = frozenset({"METHOD", "USE", "APPLY", "EDIT", "TRAIN", "EXPECT", "LET"})
_ASSIGNS = frozenset({"EQUAL", "PLUS_EQUAL", "STAR_EQUAL"})


@dataclass(frozen=True)
class Resumed:
    """The parser as it goes on, and the token that it takes next."""

    parser: InteractiveParser
    at: int


def copied(parser: InteractiveParser) -> InteractiveParser:
    return parser.copy(deepcopy_values=False)


def feeds(parser: InteractiveParser, token: Token) -> bool:
    """Feeds `token`, unless it does not fit."""
    try:
        parser.feed_token(token)
    except UnexpectedToken:
        return False
    return True


def accepted(parser: InteractiveParser) -> frozenset[str]:
    """The terminals that fit, without those that stand for something wrong."""
    return frozenset(parser.accepts()) - {"BAD_NUMBER", "OPEN_STRING", "STRAY", "COMMENT"}


def resume(parser: InteractiveParser, tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Resumed | None:
    """Where to go on after `tokens[at]` did not fit; None where nothing is left."""
    if tokens[at].type in _STARTS and not _balanced(tokens, at):
        return _skipped(parser, tokens, at + 1)
    return _repaired(parser, tokens, at, accepts) or _skipped(parser, tokens, at)


def _repaired(parser: InteractiveParser, tokens: Sequence[Token], at: int, accepts: frozenset[str]) -> Resumed | None:
    best: tuple[int, Resumed] | None = None
    for inserted in (None, *_candidates(tokens[at], accepts)):
        for skip in (0, 1):
            if (inserted is None and not skip) or at + skip >= len(tokens):
                continue
            trial = copied(parser)
            if inserted and not feeds(trial, Token.new_borrow_pos(inserted, "", tokens[at])):
                continue
            reached = _progress(copied(trial), tokens, at + skip)
            score = 2 * reached - skip
            enough = reached >= min(_ENOUGH, len(tokens) - at - skip)
            if enough and (best is None or score > best[0]):
                best = score, Resumed(trial, at + skip)
    return best[1] if best else None


def _candidates(token: Token, accepts: frozenset[str]) -> list[str]:
    """What could be put in; first the keyword that `token` looks like."""
    spelled = {text: terminal for terminal, text in keywords().items() if terminal in accepts}
    meant = spelled.get(nearest(str(token), spelled) or "")
    return sorted(accepts - {"$END"}, key=lambda terminal: (terminal != meant, terminal))


def _progress(parser: InteractiveParser, tokens: Sequence[Token], at: int) -> int:
    for reached, token in enumerate(tokens[at : at + _AHEAD]):
        if not feeds(parser, token):
            return reached
    return min(_AHEAD, len(tokens) - at)


def _skipped(parser: InteractiveParser, tokens: Sequence[Token], at: int) -> Resumed | None:
    while at < len(tokens):
        token = tokens[at]
        if token.type == "LBRACE":
            at = _closing(tokens, at) + 1
            continue
        equation = _starts_equation(tokens, at)
        if token.type in _STARTS or token.type == "RBRACE" or equation:
            unwound = _unwound(parser, tokens[at : at + 1 + equation])
            if unwound:
                return Resumed(unwound, at)
        at += 1
    return None


def _balanced(tokens: Sequence[Token], at: int) -> bool:
    """Whether the braces from here on fit each other: then one is missing before, else this statement is out of place."""
    return sum({"LBRACE": 1, "RBRACE": -1}.get(token.type, 0) for token in tokens[at:]) >= 0


def _closing(tokens: Sequence[Token], at: int) -> int:
    """The brace that closes the one at `at`; the last token where there is none."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += {"LBRACE": 1, "RBRACE": -1}.get(tokens[index].type, 0)
        if not depth:
            return index
    return len(tokens) - 1


def _starts_equation(tokens: Sequence[Token], at: int) -> bool:
    """A name and an assignment at the beginning of a line."""
    first_of_line = at == 0 or tokens[at - 1].end_line != tokens[at].line
    return first_of_line and tokens[at].type == "NAME" and tokens[at + 1].type in _ASSIGNS


def _unwound(parser: InteractiveParser, tokens: Sequence[Token]) -> InteractiveParser | None:
    """The parser with as much of its stack dropped as it takes for `tokens` to fit. Of an equation the assignment must fit, too:
    its name alone would pass for the value of the equation before.
    """
    trial = copied(parser)
    while trial.parser_state.value_stack:
        probe = copied(trial)
        if all(feeds(probe, token) for token in tokens):
            return trial
        trial.parser_state.state_stack.pop()
        trial.parser_state.value_stack.pop()
    return None
